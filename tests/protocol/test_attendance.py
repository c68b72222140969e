"""The peers that are alive, as one peer hears them, and what entries show about each member."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ROUND_SECONDS, peer_id, verify
from hypothesis import given
from hypothesis import strategies as st
from made import (
    NO_SIGNATURE,
    certify,
    child_of,
    declaration,
    founding,
    heartbeat,
    ids,
    member,
    membership_of,
    roster_1,
    roster_of,
)

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.membership import attendance as module
from p2p_diloco.protocol.membership.attendance import COUNTS_AFTER_CYCLES, CYCLES_SEEN
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.wire.grid import fold_roster
from p2p_diloco.protocol.wire.member import NO_PLACE

A, B, C = ids(3)
STRANGER = peer_id("stranger")


def member_of_three(peer: PeerId = A) -> Membership:
    return membership_of(peer, founding(), roster_1(3))


# -- heartbeats


def test_a_heartbeat_counts_if_it_is_new_signed_and_of_this_run() -> None:
    here = member_of_three()
    assert here.take_heartbeat(heartbeat(B), 0.0)
    assert not here.take_heartbeat(heartbeat(B), 0.0)
    assert here.take_heartbeat(heartbeat(B, incarnation=2), 0.0)
    assert not here.take_heartbeat(heartbeat(B, sequence=9), 0.0)
    assert not here.take_heartbeat(heartbeat(C, run=sha256(b"other")), 0.0)
    assert not here.take_heartbeat(replace(heartbeat(C), signature=NO_SIGNATURE), 0.0)
    assert set(here.alive(1.0)) == {B}
    assert here.alive(100.0) == {}


def test_a_smaller_incarnation_is_accepted_after_a_silence_unless_another_is_listed() -> None:
    wiped = heartbeat(B, incarnation=2)
    for listed, is_heard in ((None, True), (1, False), (2, True), (3, False)):
        others = () if listed is None else (member(B, incarnation=listed),)
        roster = child_of(founding().roster, (member(A), *others))
        here = membership_of(A, founding(), certify(roster, (peer_id("boot"),)))
        assert here.take_heartbeat(heartbeat(B, incarnation=3, sequence=9), 0.0)
        assert not here.take_heartbeat(wiped, 8.0), "the other start is not silent yet"
        assert here.take_heartbeat(wiped, 9.0) is is_heard
        assert (B in here.alive(9.0)) is is_heard
        assert not here.take_heartbeat(wiped, 18.0), "the same heartbeat is no news after a silence"


def test_a_smaller_incarnation_is_accepted_after_a_silence_if_no_roster_is_known() -> None:
    here = membership_of(A)
    assert [here.take_heartbeat(heartbeat(B, incarnation=number), now) for number, now in ((3, 0.0), (2, 9.0))] == [
        True,
        True,
    ]


def test_the_time_since_which_a_peer_is_heard_restarts_after_a_silence() -> None:
    here = member_of_three()
    for sequence, now, since in ((1, 0.0, 0.0), (2, 8.0, 0.0), (3, 16.0, 0.0), (4, 25.0, 25.0)):
        here.take_heartbeat(heartbeat(B, sequence=sequence), now)
        assert here.heard[B].since == since


def test_heartbeats_use_bounded_memory_and_strangers_displace_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 2)
    here = member_of_three()
    assert [here.take_heartbeat(heartbeat(peer_id(str(n))), 0.0) for n in range(4)] == [True, True, False, False]
    assert here.take_heartbeat(heartbeat(B), 0.0)
    assert here.take_heartbeat(heartbeat(peer_id("0"), sequence=2), 0.0), "one that is known is heard on"


def test_a_peer_without_a_roster_treats_all_peers_as_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 1)
    here = membership_of(A)
    assert [here.take_heartbeat(heartbeat(peer), 0.0) for peer in (B, C)] == [True, False]
    assert here.num_ready(0.0) == 1


# -- ready peers


def test_ready_peers_are_those_that_report_it_and_train() -> None:
    here = member_of_three()
    assert here.num_ready(0.0) == 0
    here.take_heartbeat(heartbeat(B), 0.0)
    here.take_heartbeat(heartbeat(C, ready=False), 0.0)
    here.take_heartbeat(heartbeat(peer_id("boot"), trains=False), 0.0)
    assert here.num_ready(0.0) == 1
    here.ready = True
    assert here.num_ready(0.0) == 2
    here.leaving = True
    assert here.num_ready(0.0) == 1
    assert membership_of(A).num_ready(0.0) == 0


def test_members_without_a_link_are_counted_by_the_entries_of_the_last_cycle() -> None:
    here = member_of_three()
    clock = here.rules.clock
    here.ready = True
    here.take_heartbeat(heartbeat(B), 0.0)
    assert here.num_ready(0.0) == 2
    here.note_entry({A, B, C}, (), 0)
    assert here.num_ready(0.0) == 3
    here.take_heartbeat(heartbeat(B, sequence=2), clock.begin(clock.num_fragments + 1))
    assert here.num_ready(clock.begin(clock.num_fragments + 1)) == 2, "it was there a cycle ago"


def test_members_of_a_grid_are_assumed_to_be_ready() -> None:
    roster = roster_of(8)
    assert len(fold_roster(roster, 3).rows) > 1
    here = membership_of(A, founding(), certify(roster, [peer_id("boot")]), group_size=3)
    assert here.num_ready(0.0) == 8


# -- declarations


def test_the_own_declaration_is_signed_and_describes_the_peer() -> None:
    here = membership_of(A, founding(), roster_1(3), incarnation=3)
    here.share, here.can_be_dialled = 0, False
    word = here.declare(5 * ROUND_SECONDS)
    assert verify(A, word.statement(), word.signature)
    assert (word.cycle, word.incarnation, word.reachable, word.trains) == (2, 3, False, True)
    assert word.share == 1, "a share of nothing is not declared"
    assert not word.leaving
    assert here.declare(-99.0).cycle == 0, "before round 0"
    assert here.declared == {A: here.declare(-99.0)}


def test_a_declaration_counts_if_it_is_new_signed_and_of_this_run() -> None:
    here = member_of_three()
    assert here.take_declaration(declaration(B, cycle=4), 5)
    for old in (
        declaration(B, cycle=4),
        declaration(B, cycle=3),
        declaration(C, run=sha256(b"other")),
        declaration(C, cycle=7),
        replace(declaration(C), signature=NO_SIGNATURE),
        declaration(A, incarnation=9),
    ):
        assert not here.take_declaration(old, 5)
    for newer in (declaration(B, cycle=6), declaration(B, leaving=True), declaration(B, incarnation=2)):
        assert here.take_declaration(newer, 5)
        assert here.declared[B] == newer


def test_nothing_is_kept_about_peers_that_the_manifest_does_not_list() -> None:
    here = member_of_three()
    here.rules = replace(here.rules, listed=frozenset({B}))
    assert here.take_declaration(declaration(B), 0)
    assert not here.take_declaration(declaration(STRANGER), 0)


def test_declarations_use_bounded_memory_and_strangers_displace_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 2)
    here = member_of_three()
    strangers = [declaration(peer_id(str(n))) for n in range(4)]
    assert [here.take_declaration(word, 0) for word in strangers] == [True, True, False, False]
    assert here.take_declaration(declaration(B), 0)
    assert here.take_declaration(declaration(peer_id("0"), cycle=1), 0)


def test_old_applications_are_dropped_and_declarations_of_members_are_kept() -> None:
    here = member_of_three()
    for word in (declaration(STRANGER, cycle=4), declaration(peer_id("new"), cycle=5), declaration(B, cycle=1)):
        assert here.take_declaration(word, 6)
    here.forget_old_declarations(6)
    assert here.declared.keys() == {STRANGER, peer_id("new"), B}
    here.forget_old_declarations(7)
    assert here.declared.keys() == {peer_id("new"), B}
    assert not here.take_declaration(declaration(STRANGER, cycle=4), 7), "it has expired"


def test_a_peer_that_declared_its_leaving_is_gone_until_its_next_incarnation() -> None:
    here = member_of_three()
    assert not here.has_left(B, 1)
    here.take_heartbeat(heartbeat(B), 0.0)
    here.take_declaration(declaration(B), 0)
    assert here.alive(0.0).keys() == {B}
    here.take_declaration(declaration(B, leaving=True), 0)
    assert here.has_left(B, 1)
    assert here.alive(0.0) == {}
    here.take_heartbeat(heartbeat(B, incarnation=2), 0.0)
    assert here.alive(0.0).keys() == {B}


# -- evidence in entries


def test_a_members_latest_presence_is_known_in_any_order_of_entries() -> None:
    here = member_of_three()
    for round_index, present in ((4, {A, B}), (9, {A}), (6, {A, B, C})):
        here.note_entry(present, present, round_index)
    assert here.present_in == {A: 9, B: 6, C: 6}


def test_the_number_of_entries_per_round_is_known_for_the_last_cycles() -> None:
    here = member_of_three()
    for round_index in (0, 3, 3, 4, 4, 4, 6):
        here.note_entry((), (), round_index)
    assert [here.num_entries(*span) for span in ((0, 2), (3, 4), (4, 4), (5, 5), (0, 9))] == [1, 5, 3, 0, 7]
    for round_index in range(1000):
        here.note_entry((), (), round_index)
    assert here.num_entries(0, 900) == 0
    assert here.num_entries(996, 999) == 4


COUNTING: list[tuple[str, int, list[int], int, bool]] = [
    ("never included", 0, [], 20, False),
    ("three cycles", 0, [18, 19, 20], 20, False),
    ("four of eight cycles", 0, [13, 15, 18, 20], 20, True),
    ("four in a row, a while ago", 0, [13, 14, 15, 16], 20, True),
    ("four, one of them too long ago", 0, [12, 13, 14, 15], 20, False),
    ("four, one of them in the cycle in which it was listed", 16, [16, 17, 18, 19], 20, False),
    ("four since it was listed", 15, [16, 17, 18, 19], 20, True),
    ("many entries in one cycle", 0, [20] * 9, 20, False),
    ("four, in any order", 0, [19, 17, 20, 18], 20, True),
    ("four, one of them more than eight before the last", 0, [20, 12, 19, 18], 20, False),
    ("of a cycle that is still to come", 0, [18, 19, 20, 21], 20, False),
]


@pytest.mark.parametrize(
    ("since", "cycles", "now", "expected"), [case[1:] for case in COUNTING], ids=[case[0] for case in COUNTING]
)
def test_a_member_counts_once_it_was_included_in_four_of_eight_cycles_since_it_was_listed(
    since: int, cycles: list[int], now: int, expected: bool
) -> None:
    here = member_of_three()
    for cycle in cycles:
        here.note_entry({A, B}, {B}, 2 * cycle)
    assert here.has_come_to_count(member(B, counts=False, since=since), now) is expected
    assert not here.has_come_to_count(member(A, counts=False, since=since), now), "to be there is not enough"


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 40), st.integers(0, 40))
def test_counting_does_not_depend_on_the_order_of_entries_of_the_last_eight_cycles(
    cycles: list[int], since: int, now: int
) -> None:
    recent = [cycle for cycle in cycles if max(cycles) - cycle < CYCLES_SEEN]
    here = member_of_three()
    for cycle in recent:
        here.note_entry((), {B}, 2 * cycle)
    seen = {cycle for cycle in recent if max(since, now - CYCLES_SEEN) < cycle <= now}
    assert here.has_come_to_count(member(B, counts=False, since=since), now) is (len(seen) >= COUNTS_AFTER_CYCLES)


def test_a_peer_founds_a_run_as_its_current_incarnation() -> None:
    assert member_of_three().me.member(3) == member(A, counts=False, share=3, place=NO_PLACE)
    bootstrap = membership_of(A, trains=False, incarnation=4).me.member()
    assert bootstrap == member(A, counts=False, trains=False, incarnation=4)
