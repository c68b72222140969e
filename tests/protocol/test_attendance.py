"""Who is here, as one peer hears it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ROUND_SECONDS, peer_id
from made import NO_SIGNATURE, certify, founding, goodbye, heartbeat, ids, member, membership_of, roster_1, roster_of

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol import attendance as module
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.entry import places_in
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.presence import RowReport

A, B, C = ids(3)
ROSTER = roster_1(3).roster


def member_of_three(peer: PeerId) -> Membership:
    return membership_of(peer, founding(), roster_1(3))


def test_a_heartbeat_counts_when_it_is_new_signed_and_of_this_run() -> None:
    here = member_of_three(A)
    assert here.hear(heartbeat(B), 0.0)
    assert not here.hear(heartbeat(B), 0.0)
    assert here.hear(heartbeat(B, incarnation=2), 0.0)
    assert not here.hear(heartbeat(B, sequence=9), 0.0)
    assert not here.hear(heartbeat(C, run=sha256(b"other")), 0.0)
    assert not here.hear(replace(heartbeat(C), signature=NO_SIGNATURE), 0.0)
    assert set(here.alive(1.0)) == {B}
    assert here.alive(100.0) == {}


def test_nobody_can_fill_the_memory_with_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 2)
    here = member_of_three(A)
    assert [here.hear(heartbeat(peer_id(str(n))), 0.0) for n in range(4)] == [True, True, False, False]


def test_a_good_bye_counts_once_when_signed_by_somebody_known() -> None:
    here = member_of_three(A)
    assert here.take_goodbye(goodbye(B, parent=ROSTER))
    assert not here.take_goodbye(goodbye(B, parent=ROSTER))
    assert not here.take_goodbye(goodbye(peer_id("stranger")))
    assert not here.take_goodbye(replace(goodbye(C), signature=NO_SIGNATURE))
    assert not here.take_goodbye(goodbye(C, run=sha256(b"other")))
    assert here.has_left(member(B))
    here.hear(heartbeat(B), 0.0)
    assert here.alive(0.0) == {}


def member_of_grid(peer: PeerId) -> Membership:
    """One of eight in three rows."""
    here = membership_of(peer, founding(), certify(ROSTER_8, [peer_id("boot")]), group_size=3)
    here.ready = True
    return here


ROSTER_8 = roster_of(8)
GRID = fold_roster(ROSTER_8, 3)
FIRST, SECOND, THIRD = GRID.columns[0]
"""The reducers of one column, in their rows."""
IDLE = GRID.rows[0][2]
"""A member of the first row that reduces nothing: three rows share out eight, so two of each row reduce."""


def reports(here: Membership, now: float = 0.0) -> dict[PeerId, RowReport]:
    sends = [action for action in here.row_reports(now) if isinstance(action, Send)]
    return {send.to: send.message for send in sends if isinstance(send.message, RowReport)}


def test_reducers_tell_their_column_how_their_row_is_doing() -> None:
    here = member_of_grid(FIRST)
    second_of_row, newcomer = GRID.rows[0][1], peer_id("newcomer 3")
    assert GRID.row_for(newcomer) == 0
    here.hear(heartbeat(second_of_row), 0.0)
    here.hear(heartbeat(newcomer, incarnation=4), 0.0)
    here.hear(heartbeat(IDLE, incarnation=2), 0.0)
    here.take_goodbye(goodbye(IDLE))
    told = reports(here)
    assert told.keys() == {SECOND, THIRD}
    report = told[SECOND]
    assert (report.row, places_in(report.present)) == (0, (0, 1))
    assert set(report.coming) == {member(newcomer, incarnation=4), member(IDLE, incarnation=2)}
    assert [word.peer for word in report.goodbyes] == [IDLE]


def test_who_reduces_nothing_and_who_is_in_one_row_reports_nothing() -> None:
    assert reports(member_of_grid(IDLE)) == {}
    assert member_of_grid(IDLE).num_ready(0.0) == 8, "it can only think that all are"
    assert reports(member_of_three(A)) == {}
    member_of_three(A).take_report(B, reports(member_of_grid(FIRST))[SECOND], 0.0)


def test_a_reducer_sees_all_rows() -> None:
    here, other = member_of_grid(FIRST), member_of_grid(SECOND)
    for peer in GRID.rows[1][:2]:
        other.hear(heartbeat(peer), 0.0)
    newcomer = next(p for n in range(9) if GRID.row_for(p := peer_id(f"new {n}")) == 1)
    other.hear(heartbeat(newcomer), 0.0)
    here.take_report(SECOND, reports(other)[FIRST], 0.0)
    here.hear(heartbeat(THIRD), 0.0)
    # Nothing is known of row 3, and there have been no entries: all of it is kept.
    assert here.present(0.0).keys() == {FIRST, *GRID.rows[1][:2], newcomer, *GRID.rows[2]}
    assert here.num_ready(0.0) == 6
    here.take_goodbye(goodbye(GRID.rows[1][1]))
    assert GRID.rows[1][1] not in here.present(0.0)


def test_of_a_row_without_reports_those_are_kept_that_had_a_part_in_the_last_entries() -> None:
    here = member_of_grid(FIRST)
    kept = GRID.rows[1][1]
    here.took_part = {FIRST: 9, kept: 9, GRID.rows[1][2]: 2}
    assert here.present(0.0).keys() == {FIRST, kept}, "the silent reducers of the column are not"


def test_reports_grow_old_and_count_from_the_reducer_of_that_row_alone() -> None:
    here, other = member_of_grid(FIRST), member_of_grid(SECOND)
    report = reports(other)[FIRST]
    for sender, wrong in (
        (THIRD, report),
        (SECOND, replace(report, row=2)),
        (SECOND, replace(report, row=9)),
        (SECOND, replace(report, roster=sha256(b"another"))),
        (GRID.rows[1][1], report),
    ):
        here.take_report(sender, wrong, 0.0)
    here.hear(heartbeat(SECOND), 0.0)
    assert len(here.present(0.0)) == 1 + 3 + 1, "as if nothing had been reported"
    here.take_report(SECOND, report, 0.0)
    assert here.present(0.0).keys() & set(GRID.rows[1]) == {SECOND}
    assert here.present(5 * ROUND_SECONDS).keys() & set(GRID.rows[1]) != {SECOND}


def test_members_that_never_hear_each_other_are_counted_by_the_entries_of_the_last_cycle() -> None:
    here = member_of_three(A)
    clock = here.rules.clock
    here.ready = True
    here.hear(heartbeat(B), 0.0)
    assert here.num_ready(0.0) == 2
    here.note_part(frozenset({A, B, C}), 0)
    assert here.num_ready(0.0) == 3
    here.hear(heartbeat(B, sequence=2), clock.begin(clock.num_fragments + 1))
    assert here.num_ready(clock.begin(clock.num_fragments + 1)) == 2, "it was there a cycle ago"
    assert membership_of(A).num_ready(0.0) == 0


def test_a_peer_that_says_good_bye_for_ever_fills_no_memory() -> None:
    here = member_of_three(A)
    assert all(here.take_goodbye(goodbye(B, incarnation=number)) for number in range(1, 1001))
    kept = [number for number in range(1, 1001) if here.has_said_goodbye(B, number)]
    assert kept == [997, 998, 999, 1000]
    assert not here.take_goodbye(goodbye(B, incarnation=5)), "older than all that are kept"


def test_strangers_that_fill_the_list_of_who_is_heard_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 2)
    here = member_of_three(A)
    strangers = [peer_id(f"stranger {number}") for number in range(3)]
    assert [here.hear(heartbeat(peer), 0.0) for peer in strangers] == [True, True, False]
    assert here.hear(heartbeat(B), 0.0)
