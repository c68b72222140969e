"""What reducers say of their rows, and what is made of it; most of it is told in test_attendance.py."""

from __future__ import annotations

from dataclasses import replace

from made import goodbye, ids, member, roster_of

from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.presence import MOST_COMING, Presence, RowView, make_report

ROSTER = roster_of(8)
GRID = fold_roster(ROSTER, 3)
MEMBERS = {m.peer: m for m in ROSTER.members}
FIRST, SECOND, _ = GRID.columns[0]
VIEW = RowView(grid=GRID, roster=ROSTER.digest(), members=MEMBERS, row=1, num_fragments=2)


def test_a_report_is_bounded() -> None:
    strangers = {bytes([1, number % 256, number // 256]): None for number in range(4 * MOST_COMING)}
    here = {peer: member(peer) for peer in strangers}  # type: ignore[arg-type]
    report = make_report(VIEW, here, [goodbye(ids(1)[0])] * (2 * MOST_COMING))  # type: ignore[arg-type]
    assert len(report.coming) == len(report.goodbyes) == MOST_COMING
    assert report.present == bytes(1)


def test_a_member_whose_share_has_changed_is_told_whole() -> None:
    thinner = {peer: replace(MEMBERS[peer], share=2 if peer == SECOND else 8) for peer in GRID.rows[1]}
    report = make_report(VIEW, thinner, [])
    assert [(one.peer, one.share) for one in report.coming] == [(SECOND, 2)]
    presence = Presence(me=FIRST, keep_seconds=10.0)
    assert presence.take(SECOND, report, GRID, ROSTER.digest(), 0.0)
    assert presence.everybody({}, replace(VIEW, row=0), {}, 0.0)[SECOND].share == 2


def test_bits_beyond_the_row_name_nobody() -> None:
    presence = Presence(me=FIRST, keep_seconds=10.0)
    report = replace(make_report(VIEW, {}, []), present=b"\xff\xff")
    assert presence.take(SECOND, report, GRID, ROSTER.digest(), 0.0)
    seen = presence.everybody({}, replace(VIEW, row=0), {}, 0.0)
    assert seen.keys() & set(GRID.rows[1]) == set(GRID.rows[1])


def test_a_report_says_nothing_of_members_of_other_rows() -> None:
    """A lying reducer could list them at incarnations that nobody has, and so keep them from contributing."""
    victim, own = GRID.rows[1][-1], GRID.rows[2][-1]
    words = (member(victim, incarnation=99), member(own, incarnation=2))
    lie = replace(make_report(replace(VIEW, row=2), {}, []), coming=words)
    presence = Presence(me=FIRST, keep_seconds=10.0)
    assert presence.take(GRID.columns[0][2], lie, GRID, ROSTER.digest(), 0.0)
    seen = presence.everybody({}, replace(VIEW, row=0), {}, 0.0)
    assert (seen[victim].incarnation, seen[own].incarnation) == (1, 2)


def test_only_reducers_of_a_grid_see_all() -> None:
    one_row = fold_roster(roster_of(3), 3)
    assert not Presence(me=ids(1)[0], keep_seconds=1.0).sees_all(one_row)
    assert Presence(me=FIRST, keep_seconds=1.0).sees_all(GRID)
    assert not Presence(me=GRID.rows[0][2], keep_seconds=1.0).sees_all(GRID)
