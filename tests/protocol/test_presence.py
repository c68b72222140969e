"""Presence of each member in entries, and the view that a voter reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from council import BOOT, LAST_ROUNDS, LEAD, NOW, OTHER, ROSTER, SEEN, A, B, C, D, listen, member_of_three, seeing
from fake_run import CYCLE_SECONDS, ballot_number, peer_id
from hypothesis import given
from hypothesis import strategies as st
from made import certify, change, child_of, founding, heartbeat, ids, member, membership_of, roster_1, roster_of

from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership.presence import COUNTS_AFTER_CYCLES, CYCLES_SEEN
from p2p_diloco.protocol.wire.ballot import View
from p2p_diloco.protocol.wire.entry import places_in
from p2p_diloco.protocol.wire.member import NO_PLACE
from p2p_diloco.protocol.wire.roster import Roster


def named(bitmap: bytes, roster: Roster = ROSTER) -> set[PeerId]:
    return {roster.members[place].peer for place in places_in(bitmap)}


def test_if_most_spans_got_entries_a_member_in_none_of_four_cycles_is_absent_even_if_heard() -> None:
    here = seeing(num_entries=3, linked=(B, C))
    here.presence.note_entry({B}, (), LAST_ROUNDS[0])
    here.presence.note_entry({C}, (), LAST_ROUNDS[0] - 1)
    here.liveness.take(heartbeat(C), SEEN)
    assert named(here.presence.view(ROSTER, SEEN).absent) == {C}


def test_a_member_whose_link_was_closed_is_absent_after_a_cycle_and_one_with_a_link_is_not() -> None:
    here = seeing(num_entries=3, linked=(B,))
    for peer in (B, C):
        here.presence.note_entry({peer}, (), LAST_ROUNDS[-3])
        here.liveness.take(heartbeat(peer), SEEN - CYCLE_SECONDS - 1.0)
    assert named(here.presence.view(ROSTER, SEEN).absent) == {C}
    here.liveness.take(heartbeat(C, sequence=2), SEEN - 1.0)
    assert named(here.presence.view(ROSTER, SEEN).absent) == set()


def test_right_after_a_stall_nobody_is_absent_for_having_been_in_no_entry() -> None:
    here = seeing(linked=(B, C))
    for number in range(5):
        here.presence.note_entry({A, B}, (), LAST_ROUNDS[-2] + number % 2)
    here.liveness.take(heartbeat(C), SEEN)
    assert named(here.presence.view(ROSTER, SEEN).absent) == set()


def test_if_few_spans_got_entries_a_member_not_heard_for_four_cycles_is_absent() -> None:
    here = seeing(num_entries=1, linked=(B, C))
    here.liveness.take(heartbeat(B), SEEN - 4 * CYCLE_SECONDS + 1.0)
    assert named(here.presence.view(ROSTER, SEEN).absent) == {C}
    here.presence.note_entry({C}, (), LAST_ROUNDS[-1])
    assert named(here.presence.view(ROSTER, SEEN).absent) == set()
    assert named(here.presence.view(ROSTER, SEEN + 0.1).heard) == {A}, "a heartbeat counts for eight seconds"


def test_no_member_is_absent_before_it_was_listed_and_this_peer_listened_for_four_cycles() -> None:
    woken = membership_of(A, founding(), roster_1(3), linked=(B, C))
    woken.tick(SEEN - 1.0)
    assert named(woken.presence.view(ROSTER, SEEN).absent) == set()
    here = seeing(num_entries=5, linked=(B, C))
    assert named(here.presence.view(ROSTER, SEEN).absent) == {B, C}
    just = certify(child_of(ROSTER, [*ROSTER.members, member(D, since=2)], cycle=2), ids(3), ballot_number(5, 0))
    here = seeing(roster_1(3), just, num_entries=5, linked=(B, C, D))
    assert named(here.presence.view(just.roster, SEEN).absent, just.roster) == {B, C}


def test_a_peer_that_only_dials_out_misses_no_member_that_it_cannot_hear() -> None:
    hidden = certify(
        child_of(founding().roster, [member(B), member(A, reduces=False), member(C, reduces=False)]), [BOOT]
    )
    here = seeing(hidden, linked=(B,))
    change(here, can_be_dialled=False)
    assert named(here.presence.view(hidden.roster, SEEN).absent, hidden.roster) == {B}


GRID_8 = certify(roster_of(8), [BOOT])


def in_grid(peer: PeerId, num_entries: int, present: Iterable[PeerId] = ()) -> View:
    here = membership_of(peer, founding(), GRID_8, group_size=3, linked=GRID_8.roster.peers())
    listen(here, num_entries, {peer, *present})
    return here.presence.view(GRID_8.roster, SEEN)


def test_in_a_grid_members_of_a_silent_row_are_spared_and_its_reducers_are_not() -> None:
    grid = fold_roster(GRID_8.roster, 3)
    me = grid.rows[0][0]
    silent = grid.rows[1]
    assert len(grid.rows) > 1
    others = [peer for row in grid.rows if row != silent for peer in row]
    missing = named(in_grid(me, 5, others).absent, GRID_8.roster)
    assert missing == set(silent), "all eight reduce by their listing"
    hidden = child_of(
        founding().roster, [replace(m, reduces=place < 6) for place, m in enumerate(GRID_8.roster.members)]
    )
    here = membership_of(A, founding(), certify(hidden, [BOOT]), group_size=3, linked=hidden.peers())
    fold = fold_roster(hidden, 3)
    row = next(row for row in fold.rows if A not in row and not set(row) <= fold.reducers())
    listen(here, 5, hidden.peers() - set(row))
    assert named(here.presence.view(hidden, SEEN).absent, hidden) == set(row) & {
        m.peer for m in hidden.members if m.reduces
    }


def test_in_a_grid_without_entries_a_member_misses_only_its_neighbours() -> None:
    grid = fold_roster(GRID_8.roster, 3)
    me = grid.rows[0][0]
    assert named(in_grid(me, 0).absent, GRID_8.roster) == grid.neighbours(me)
    assert grid.neighbours(me) < GRID_8.roster.peers() - {me}


def test_a_view_lists_peers_heard_peers_that_came_to_count_and_the_number_of_entries() -> None:
    fresh = certify(child_of(founding().roster, [member(A), member(B, counts=False), member(C)]), [BOOT])
    here = membership_of(A, founding(), fresh)
    here.presence.round_over(-1, 77)
    for cycle in range(1, 5):
        here.presence.note_entry({A, B, C}, {A, B, C}, 2 * cycle)
    here.liveness.take(heartbeat(B), 4 * CYCLE_SECONDS)
    view = here.presence.view(fresh.roster, 4 * CYCLE_SECONDS + 1.0)
    assert named(view.heard, fresh.roster) == {A, B}
    assert named(view.counting, fresh.roster) == {B}, "the others count already"
    assert named(view.idle, fresh.roster) == set()
    assert view.height == 77


def test_an_owner_without_entries_is_reported_as_idle() -> None:
    here = member_of_three(LEAD)
    rules = here.rules
    silent = OTHER
    reports: list[Action] = []
    for round_index in range(1, 1 + 4 * rules.clock.num_fragments):
        fragment = rules.clock.fragment(round_index)
        roster, grid = here.book.folded(ROSTER.digest(), round_index)
        for index in range(rules.num_spans[fragment]):
            if grid.owner(SpanId(fragment, index)) != silent:
                here.presence.owners.entry_absorbed(round_index, SpanId(fragment, index), roster, grid)
        reports += here.presence.round_over(round_index, 0)
    (report,) = reports
    assert isinstance(report, Report)
    assert report.topic == "reducer-lost"
    assert report.text.startswith(f"the spans of {short_peer_id(silent)} got no entries for 2 cycles while others' did")
    assert named(here.presence.view(ROSTER, NOW).idle) == {silent}


def test_an_unready_peer_draws_no_conclusions_from_its_logs() -> None:
    here = membership_of(LEAD, founding(), roster_1(3))
    assert here.presence.round_over(1, 0) == []
    here.local.set_ready(True)
    assert here.presence.round_over(0, 0) == [], "the round before the first entries"


def test_ready_peers_are_those_that_report_it_and_train() -> None:
    here = membership_of(A, founding(), roster_1(3))
    assert here.presence.num_ready(0.0) == 0
    here.liveness.take(heartbeat(B), 0.0)
    here.liveness.take(heartbeat(C, ready=False), 0.0)
    here.liveness.take(heartbeat(peer_id("boot"), trains=False), 0.0)
    assert here.presence.num_ready(0.0) == 1
    here.local.set_ready(True)
    assert here.presence.num_ready(0.0) == 2
    here.leave(0.0)
    assert here.presence.num_ready(0.0) == 1
    assert membership_of(A).presence.num_ready(0.0) == 0


def test_members_without_a_link_are_counted_by_the_entries_of_the_last_cycle() -> None:
    here = member_of_three(A)
    clock = here.rules.clock
    here.local.set_ready(True)
    here.liveness.take(heartbeat(B), 0.0)
    assert here.presence.num_ready(0.0) == 2
    here.presence.note_entry({A, B, C}, (), 0)
    assert here.presence.num_ready(0.0) == 3
    here.liveness.take(heartbeat(B, sequence=2), clock.begin(clock.num_fragments + 1))
    assert here.presence.num_ready(clock.begin(clock.num_fragments + 1)) == 2, "it was there a cycle ago"


def test_members_of_a_grid_are_assumed_to_be_ready() -> None:
    roster = roster_of(8)
    assert len(fold_roster(roster, 3).rows) > 1
    here = membership_of(A, founding(), certify(roster, [peer_id("boot")]), group_size=3)
    assert here.presence.num_ready(0.0) == 8


def test_a_members_latest_presence_is_known_in_any_order_of_entries() -> None:
    here = member_of_three(A)
    for round_index, present in ((4, {A, B}), (9, {A}), (6, {A, B, C})):
        here.presence.note_entry(present, present, round_index)
    assert [here.presence.last_round(peer) for peer in (A, B, C)] == [9, 6, 6]
    assert here.presence.latest_round() == 9


def test_the_number_of_entries_per_round_is_known_for_the_last_cycles() -> None:
    here = member_of_three(A)
    for round_index in (0, 3, 3, 4, 4, 4, 6):
        here.presence.note_entry((), (), round_index)
    assert [here.presence.num_entries(*span) for span in ((0, 2), (3, 4), (4, 4), (5, 5), (0, 9))] == [1, 5, 3, 0, 7]
    for round_index in range(1000):
        here.presence.note_entry((), (), round_index)
    assert here.presence.num_entries(0, 900) == 0
    assert here.presence.num_entries(996, 999) == 4


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
    here = member_of_three(A)
    for cycle in cycles:
        here.presence.note_entry({A, B}, {B}, 2 * cycle)
    assert here.presence.has_come_to_count(member(B, counts=False, since=since), now) is expected
    assert not here.presence.has_come_to_count(member(A, counts=False, since=since), now), "to be there is not enough"


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 40), st.integers(0, 40))
def test_counting_does_not_depend_on_the_order_of_entries_of_the_last_eight_cycles(
    cycles: list[int], since: int, now: int
) -> None:
    recent = [cycle for cycle in cycles if max(cycles) - cycle < CYCLES_SEEN]
    here = member_of_three(A)
    for cycle in recent:
        here.presence.note_entry((), {B}, 2 * cycle)
    seen = {cycle for cycle in recent if max(since, now - CYCLES_SEEN) < cycle <= now}
    assert here.presence.has_come_to_count(member(B, counts=False, since=since), now) is (
        len(seen) >= COUNTS_AFTER_CYCLES
    )


def test_a_peer_founds_a_run_as_its_current_incarnation() -> None:
    assert member_of_three(A).local.me.member(3) == member(A, counts=False, share=3, place=NO_PLACE)
    bootstrap = membership_of(A, trains=False, incarnation=4).local.me.member()
    assert bootstrap == member(A, counts=False, trains=False, incarnation=4)
