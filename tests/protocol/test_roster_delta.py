"""A roster as what differs from its parent: exact for any list, short for few changes, and never anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import RUN, peer_id
from hypothesis import given, settings
from hypothesis import strategies as st
from made import certify, child_of, founding, goodbye, ids, member, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import sha256
from p2p_diloco.protocol.ballot import Proposal
from p2p_diloco.protocol.grid import grid_order, keep_places
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.messages import RosterReply, decode_message, encode_message
from p2p_diloco.protocol.roster import MOST_MEMBERS, Roster
from p2p_diloco.protocol.roster_delta import (
    CertifiedDelta,
    ProposalDelta,
    RosterDelta,
    certified_delta,
    difference,
    proposal_delta,
    rebuild,
    rebuild_certified,
    rebuild_proposal,
)

EVERYBODY = [peer_id(f"peer {place}") for place in range(120)]
PARENT = roster_of(3)
A, B, C, D = ids(4)


def listing(*members: Member, k: int = 1, **changes: object) -> Roster:
    return child_of(founding().roster, members, **{"k": k, **changes})


def through_the_wire(delta: RosterDelta) -> RosterDelta:
    word = ProposalDelta(ballot=1, delta=delta, signature=bytes(64))
    found = decode_message(encode_message(word))
    assert isinstance(found, ProposalDelta)
    assert found == word
    return found.delta


def size(delta: RosterDelta) -> int:
    return len(encode_message(ProposalDelta(ballot=1, delta=delta, signature=bytes(64))))


@st.composite
def member_lists(draw: st.DrawFn) -> tuple[Member, ...]:
    """Any list that a roster may have: each peer once, in any order, those that can be dialled first."""
    places = draw(st.lists(st.integers(0, 39), min_size=1, unique=True))
    num_dialable = draw(st.integers(0, len(places)))
    return tuple(
        Member(peer=EVERYBODY[at], incarnation=draw(st.integers(1, 3)), can_be_dialled=place < num_dialable)
        for place, at in enumerate(places)
    )


@st.composite
def changed_lists(draw: st.DrawFn) -> tuple[tuple[Member, ...], tuple[Member, ...], int]:
    """A grid's members, those of a later roster as a lead wishes for them, and how many changed."""
    before = [
        Member(peer=EVERYBODY[at], incarnation=1, can_be_dialled=at % 3 > 0) for at in range(draw(st.integers(1, 80)))
    ]
    old = grid_order(before, RUN, 0)
    gone, again, moved = (draw(st.sets(st.integers(0, len(old) - 1), max_size=9)) for _ in range(3))
    come = draw(st.integers(0, 9))
    new = [
        replace(m, incarnation=1 + (place in again), can_be_dialled=m.can_be_dialled != (place in moved))
        for place, m in enumerate(old)
        if place not in gone
    ]
    new += [member(peer, dialable=place % 2 == 0) for place, peer in enumerate(EVERYBODY[80 : 80 + come])]
    return old, tuple(new), len(gone | again | moved) + come


@given(member_lists(), member_lists(), st.integers(0, 2), st.booleans())
def test_any_list_comes_back_from_any_other(
    before: tuple[Member, ...], after: tuple[Member, ...], regrid: int, is_drawn: bool
) -> None:
    parent = listing(*before)
    members = grid_order(after, RUN, regrid) if is_drawn else after
    roster = child_of(parent, members, regrid=regrid, goodbyes=(goodbye(A, parent=parent),), included_total=7)
    assert rebuild(through_the_wire(difference(roster, parent)), parent) == roster


@given(changed_lists(), st.booleans())
def test_its_size_grows_with_the_changes_and_not_with_the_list(
    made: tuple[tuple[Member, ...], tuple[Member, ...], int], is_drawn: bool
) -> None:
    old, new, num_changes = made
    parent = listing(*old)
    members = grid_order(new, RUN, 1) if is_drawn else keep_places(old, new, RUN, 0)
    delta = difference(child_of(parent, members, regrid=int(is_drawn)), parent)
    assert size(delta) <= 360 + 64 * num_changes


def test_a_thousand_members_with_one_change_are_a_few_hundred_bytes() -> None:
    peers = [peer_id(f"m{place}") for place in range(1025)]
    old = grid_order([member(peer, dialable=place % 3 > 0) for place, peer in enumerate(peers[:1024])], RUN, 0)
    parent = listing(*old)
    for regrid in (0, 1):
        new = (*old[:500], *old[501:], member(peers[1024]))
        members = grid_order(new, RUN, 1) if regrid else keep_places(old, new, RUN, 0)
        roster = child_of(parent, members, regrid=regrid)
        delta = difference(roster, parent)
        assert size(delta) < 420
        assert delta.is_redrawn is bool(regrid)
        assert rebuild(through_the_wire(delta), parent) == roster


def test_a_new_grid_in_another_order_than_the_rule_gives_is_told_place_by_place() -> None:
    drawn = grid_order(PARENT.members, RUN, 1)
    odd = child_of(PARENT, drawn[::-1], regrid=1)
    delta = difference(odd, PARENT)
    assert not delta.is_redrawn
    assert rebuild(delta, PARENT) == odd


def test_who_came_again_or_can_be_dialled_since_is_told_whole_and_nobody_else() -> None:
    again = member(B, incarnation=2)
    hidden = member(C, dialable=False)
    delta = difference(child_of(PARENT, (member(A), again, member(D), hidden)), PARENT)
    assert delta.newcomers == (again, member(D), hidden)
    assert delta.runs == ((0, 1), (3, 3))


def test_an_object_that_passes_through_many_hands_is_rebuilt_once() -> None:
    delta = difference(child_of(PARENT, PARENT.members), PARENT)
    assert rebuild(delta, PARENT) is rebuild(delta, PARENT)
    with pytest.raises(PeerError, match="another roster than roster 1"):
        rebuild(delta, roster_of(2))


def delta_with(**changes: object) -> RosterDelta:
    return replace(difference(child_of(PARENT, PARENT.members), PARENT), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        (
            delta_with(rest=replace(founding().roster, members=())),
            "roster 0 comes as a difference to another roster than roster 1",
        ),
        (delta_with(runs=((0, 4),)), "roster 2 comes as a difference that takes place 4 of 3"),
        (delta_with(runs=((65535, 1),)), "roster 2 comes as a difference that takes place 65536 of 3"),
        (
            delta_with(runs=((0, 65535),) * MOST_MEMBERS),
            f"roster 2 comes as a difference with {65535 * MOST_MEMBERS} members; at most {MOST_MEMBERS} fit",
        ),
        (delta_with(runs=((0, 3), (1, 1))), "roster 2 comes as a difference that lists a peer twice"),
        (delta_with(newcomers=(member(A, incarnation=2),), runs=((0, 4),)), "lists a peer twice"),
        (delta_with(runs=((0, 2),)), "roster 2 is another one than its difference to roster 1 names"),
        (delta_with(runs=()), "roster 2 is another one than its difference to roster 1 names"),
        (delta_with(is_redrawn=True, rest=replace(PARENT, members=(), parent=PARENT.digest(), k=2)), "another one"),
        (delta_with(digest=sha256(b"other")), "another one than its difference"),
    ],
)
def test_a_difference_that_does_not_hold_is_refused_with_a_reason(delta: RosterDelta, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        rebuild(through_the_wire(delta), PARENT)


@settings(max_examples=300)
@given(st.data())
def test_a_strangers_bytes_are_refused_or_say_which_roster_they_are(data: st.DataObject) -> None:
    child = child_of(PARENT, (*PARENT.members[1:], member(D)), goodbyes=(goodbye(A, parent=PARENT),))
    word = certified_delta(certify(child, [A, B]), PARENT)
    assert word is not None
    frame = bytearray(encode_message(word))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_message(bytes(frame))
        assert isinstance(found, CertifiedDelta)
        certified = rebuild_certified(found, PARENT)
    except PeerError:
        return
    assert certified.roster.digest() == found.delta.digest
    assert {peer for peer, _ in certified.votes} <= PARENT.peers()


def test_a_proposal_comes_back_with_its_signature() -> None:
    proposal = Proposal(ballot=9, roster=child_of(PARENT, PARENT.members), signature=bytes(range(64)))
    assert rebuild_proposal(proposal_delta(proposal, PARENT), PARENT) == proposal


@given(st.sets(st.integers(0, 2), min_size=1))
def test_votes_come_back_and_cost_a_place_and_a_signature_each(voters: set[int]) -> None:
    certified = certify(child_of(PARENT, PARENT.members), [PARENT.members[place].peer for place in voters])
    word, without = certified_delta(certified, PARENT), certified_delta(replace(certified, votes=()), PARENT)
    assert word is not None
    assert without is not None
    assert rebuild_certified(word, PARENT) == certified
    assert len(encode_message(word)) - len(encode_message(without)) == 66 * len(voters)
    assert len(encode_message(word)) < len(encode_message(RosterReply(rosters=(certified,))))


def test_votes_of_others_than_members_do_not_travel_as_places() -> None:
    assert certified_delta(certify(child_of(PARENT, PARENT.members), [A, D]), PARENT) is None
    word = certified_delta(certify(child_of(PARENT, PARENT.members), [A]), PARENT)
    assert word is not None
    with pytest.raises(PeerError, match="roster 2 holds a vote of member 3 of a parent with 3 members"):
        rebuild_certified(replace(word, votes=((3, bytes(64)),)), PARENT)
