"""Every message that is a list fits its frame, however many members there are."""

from __future__ import annotations

import pytest
from fake_run import peer_id, run_rules, verify
from made import book_with, certify, child_of, declaration, founding, head_of, heartbeat, member, self_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.outer.fragments import MOST_SPANS
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.wire.ballot import (
    MOST_DECLARATION_BYTES,
    MOST_DECLARATIONS,
    MOST_PROMISES,
    Promise,
    Promised,
    Proposal,
    View,
    declarations_bytes,
)
from p2p_diloco.protocol.wire.member import Declaration, Member
from p2p_diloco.protocol.wire.messages import (
    MOST_RECORD_BYTES,
    MOST_RECORDS,
    ContentReply,
    HeadsReply,
    Introductions,
    Message,
    RosterReply,
    RosterRequest,
    encode_message,
)
from p2p_diloco.protocol.wire.roster import MOST_MEMBERS, MOST_VOTERS, CertifiedRoster, Roster
from p2p_diloco.transport.link import TransportLimits

FRAME_BYTES = TransportLimits().control_frame_bytes
ENOUGH_VOTES = MOST_VOTERS // 2 + 1


def crowd(num_members: int) -> list[Member]:
    return [member(PeerId(sha256(b"member %d" % number))) for number in range(num_members)]


def certified_by_enough(roster: Roster, parent: Roster) -> CertifiedRoster:
    voters = sorted(parent.voters)
    return certify(roster, voters[: len(voters) // 2 + 1])


def chain_of(num_members: int, length: int) -> list[CertifiedRoster]:
    """Return the founding roster and a number of rosters, each certified by as many voters as are needed."""
    chain = [founding()]
    for _ in range(length):
        parent = chain[-1].roster
        chain.append(certified_by_enough(child_of(parent, crowd(num_members)), parent))
    return chain


@pytest.mark.parametrize("num_members", [3, 130, 512, pytest.param(MOST_MEMBERS, marks=pytest.mark.slow)])
def test_a_joiner_gets_the_whole_chain_in_replies_that_fit_a_frame(num_members: int) -> None:
    chain = chain_of(num_members, 30)
    donor = book_with(*chain)
    joiner = PeerEngine(me=self_of(peer_id("joiner")), rules=run_rules(), verify=verify)
    first = chain[1].roster.members[0].peer
    (ask,) = joiner.receive(first, heartbeat(first, roster=chain[-1].roster.digest(), roster_k=30), 0.0)
    replies = 0
    while True:
        assert isinstance(ask, Send)
        assert isinstance(ask.message, RosterRequest)
        reply = RosterReply(rosters=donor.after(ask.message.known))
        assert len(encode_message(reply)) <= FRAME_BYTES
        actions = joiner.receive(first, reply, 0.0)
        replies += 1
        asks = [action for action in actions if isinstance(action, Send) and isinstance(action.message, RosterRequest)]
        if not asks:
            break
        ask = asks[-1]
    assert joiner.book.in_force == chain[-1].roster
    assert replies <= 31


def test_a_roster_that_would_not_fit_a_frame_is_refused_before_it_is_in_force() -> None:
    first = chain_of(MOST_MEMBERS, 1)[-1]
    book = book_with(founding(), first)
    child = child_of(first.roster, crowd(MOST_MEMBERS))
    with pytest.raises(PeerError, match=r"roster 2 takes \d+ bytes; 245760 fit one message"):
        book.add(certify(child, first.roster.peers()))
    assert book.in_force == first.roster
    assert book.add(certified_by_enough(child, first.roster))


def promises_on(parent: Roster, num_promises: int) -> tuple[Promise, ...]:
    """Return a number of promises, each with as many declarations as it may show."""
    bitmap = bytes(len(parent.members) // 8)
    words: list[Declaration] = []
    for number in range(MOST_DECLARATIONS):
        word = declaration(peer_id(f"new {number}"), reachable=False)
        if declarations_bytes([*words, word]) <= MOST_DECLARATION_BYTES:
            words.append(word)
    assert declarations_bytes(words) > MOST_DECLARATION_BYTES - words[0].num_bytes()
    seen = View(absent=bitmap, heard=bitmap, counting=bitmap, idle=bitmap, height=7, declarations=tuple(words))
    return tuple(
        Promise(
            parent=parent.digest(),
            degraded=False,
            ballot=9,
            voted=(5, parent.digest()),
            view=seen,
            voter=one.peer,
            signature=bytes(64),
        )
        for one in parent.members[:num_promises]
    )


def proposal_of(num_promises: int) -> Proposal:
    """Return the proposal of a full roster with a number of promises, and as many of its first ballot."""
    parent = chain_of(MOST_MEMBERS, 1)[-1].roster
    words = promises_on(parent, num_promises)
    return Proposal(ballot=9, roster=child_of(parent, parent.members), promises=words, origin=words)


def largest_words() -> list[Message]:
    """Return the longest message of each kind that grows with the run."""
    first = chain_of(MOST_MEMBERS, 1)[-1].roster
    asked, digest = proposal_of(ENOUGH_VOTES), sha256(b"a digest")
    return [
        RosterReply(rosters=(certified_by_enough(child_of(first, crowd(MOST_MEMBERS)), first),)),
        asked,
        Promised(promise=asked.promises[0], voted=asked),
        HeadsReply(fragment=0, heads=tuple(head_of() for _ in range(MOST_SPANS))),
        ContentReply(fragment=0, digests=tuple((digest, digest) for _ in range(MOST_SPANS))),
        Introductions(records=(bytes(MOST_RECORD_BYTES),) * MOST_RECORDS),
    ]


@pytest.mark.parametrize("word", largest_words(), ids=lambda word: type(word).__name__)
def test_the_longest_message_of_each_kind_fits_a_frame(word: Message) -> None:
    assert len(encode_message(word)) <= FRAME_BYTES


def test_a_proposal_with_the_maximum_of_promises_fits_a_frame_alone_and_in_a_promise() -> None:
    """All voters promise if nothing changes, until one brings news: a leader then holds more than it needs."""
    assert MOST_PROMISES >= ENOUGH_VOTES
    asked = proposal_of(MOST_PROMISES)
    assert len(encode_message(asked)) <= FRAME_BYTES
    assert len(encode_message(Promised(promise=asked.promises[0], voted=asked))) <= FRAME_BYTES
