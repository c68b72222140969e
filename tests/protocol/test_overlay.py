"""Routes through the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import peer_id
from made import member, roster_of

from p2p_diloco.protocol.grid import Grid, column_mates, fold_roster, row_mates


def grid_of(num_members: int, num_reducers: int) -> Grid:
    members = [member(peer_id(f"m{n}"), reduces=n < num_reducers) for n in range(num_members)]
    return fold_roster(replace(roster_of(1), members=tuple(members)), 4)


@pytest.mark.parametrize(("num_members", "num_reducers"), [(9, 9), (40, 40), (40, 25), (64, 10)])
def test_a_message_by_row_and_column_reaches_all_members(num_members: int, num_reducers: int) -> None:
    grid = grid_of(num_members, num_reducers)
    for origin in grid.reducers():
        column = column_mates(grid, origin)
        heard = row_mates(grid, origin) | column
        for mate in column:
            heard |= row_mates(grid, mate)
        assert heard == grid.row_of.keys() - {origin}


def test_a_member_that_does_not_reduce_has_a_row_but_no_column() -> None:
    grid = grid_of(40, 25)
    idle = next(peer for peer in sorted(grid.row_of) if peer not in grid.reducers())
    assert column_mates(grid, idle) == frozenset()
    assert row_mates(grid, idle) == frozenset(grid.rows[grid.row_of[idle]]) - {idle}


def test_in_one_row_all_others_are_row_mates() -> None:
    grid = fold_roster(roster_of(3), 16)
    first, second, third = grid.rows[0]
    assert row_mates(grid, first) == {second, third}
    assert column_mates(grid, first) == frozenset()
