"""Every reply that is a list fits the frame that it goes in, however many members there are."""

from __future__ import annotations

import pytest
from fake_run import peer_id, run_rules, verify
from made import book_with, certify, child_of, founding, goodbye, head_of, heartbeat, member, self_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.outer.fragments import MOST_SPANS
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.ballot import Promise, Proposal
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.messages import (
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
from p2p_diloco.protocol.presence import MOST_COMING, RowReport
from p2p_diloco.protocol.roster import MOST_MEMBERS, MOST_QUOTED, CertifiedRoster, Roster, votes_needed
from p2p_diloco.protocol.roster_delta import certified_delta, proposal_delta
from p2p_diloco.transport.link import TransportLimits

FRAME_BYTES = TransportLimits().control_frame_bytes


def crowd(num_members: int) -> list[Member]:
    return [member(PeerId(sha256(b"member %d" % number))) for number in range(num_members)]


def certified_by_enough(roster: Roster, parent: Roster) -> CertifiedRoster:
    voters = [voter.peer for voter in parent.members]
    return certify(roster, voters[: votes_needed(len(voters), 0)])


def chain_of(num_members: int, length: int) -> list[CertifiedRoster]:
    """Return the founding roster and rosters of so many members, each certified by as many as are needed."""
    chain = [founding()]
    for _ in range(length):
        parent = chain[-1].roster
        chain.append(certified_by_enough(child_of(parent, crowd(num_members)), parent))
    return chain


@pytest.mark.parametrize("num_members", [3, 130, 512, MOST_MEMBERS])
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


def largest_words() -> list[Message]:
    """Return the longest message of each kind that grows with the run."""
    first = chain_of(MOST_MEMBERS, 1)[-1].roster
    words = tuple(goodbye(voter.peer, parent=first) for voter in first.members[:MOST_QUOTED])
    turned = [*reversed(crowd(MOST_MEMBERS))][::2]
    child = child_of(first, turned, goodbyes=words)
    enough = certified_by_enough(child, first)
    delta = certified_delta(enough, first)
    assert delta is not None
    promised = Promise(parent=first.digest(), level=0, ballot=1, voted=(1, child), signature=bytes(64))
    asked = proposal_delta(Proposal(ballot=1, roster=child, signature=bytes(64)), first)
    digest = sha256(b"a digest")
    return [
        RosterReply(rosters=(enough,)),
        delta,
        promised,
        asked,
        HeadsReply(fragment=0, heads=tuple(head_of() for _ in range(MOST_SPANS))),
        ContentReply(fragment=0, digests=tuple((digest, digest) for _ in range(MOST_SPANS))),
        Introductions(records=(bytes(MOST_RECORD_BYTES),) * MOST_RECORDS),
        RowReport(
            roster=digest,
            row=0,
            present=bytes(MOST_MEMBERS // 8),
            coming=tuple(crowd(MOST_COMING)),
            goodbyes=words[:MOST_COMING],
        ),
    ]


@pytest.mark.parametrize("word", largest_words(), ids=lambda word: type(word).__name__)
def test_the_longest_word_of_each_kind_fits_a_frame(word: Message) -> None:
    assert len(encode_message(word)) <= FRAME_BYTES
