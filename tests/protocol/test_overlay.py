"""Ways through the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import peer_id
from made import member, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.overlay import MOST_HOPS, column_mates, hands_on_to, next_hop, row_mates


def grid_of(num_members: int, num_dialable: int) -> Grid:
    members = [member(peer_id(f"m{n}"), dialable=n < num_dialable) for n in range(num_members)]
    return fold_roster(replace(roster_of(1), members=tuple(members)), 4)


def links(grid: Grid, peer: PeerId) -> set[PeerId]:
    return set(grid.neighbours(peer))


@pytest.mark.parametrize(("num_members", "num_dialable"), [(9, 9), (40, 40), (40, 25), (64, 10)])
def test_every_word_arrives_within_the_hops_allowed(num_members: int, num_dialable: int) -> None:
    grid = grid_of(num_members, num_dialable)
    reducers = grid.reducers()
    for source in grid.row_of:
        for to in reducers - {source}:
            at, hops = source, 0
            while at != to:
                step = next_hop(grid, at, to, links(grid, at))
                assert step is not None
                at, hops = step, hops + 1
                assert hops <= MOST_HOPS


@pytest.mark.parametrize(("num_members", "num_dialable"), [(9, 9), (40, 40), (40, 25), (64, 10)])
def test_a_word_for_everybody_reaches_everybody_once(num_members: int, num_dialable: int) -> None:
    grid = grid_of(num_members, num_dialable)
    for origin in grid.reducers():
        first = row_mates(grid, origin) | column_mates(grid, origin)
        heard = sorted([*first, *(peer for one in first for peer in hands_on_to(grid, origin, one))])
        assert heard == sorted(grid.row_of.keys() - {origin})


def test_in_one_row_nothing_is_handed_on() -> None:
    grid = fold_roster(roster_of(3), 16)
    first, second, _ = grid.rows[0]
    assert hands_on_to(grid, first, second) == frozenset()


def test_a_way_round_a_dead_link() -> None:
    grid = grid_of(9, 9)
    source, to = grid.columns[0][0], grid.columns[0][1]
    direct = links(grid, source)
    assert next_hop(grid, source, to, direct) == to
    assert next_hop(grid, source, to, direct - {to}) in row_mates(grid, source)
    assert next_hop(grid, source, to, ()) is None


def test_a_way_through_the_other_row_where_the_own_one_is_cut() -> None:
    grid = grid_of(9, 9)
    source, to = grid.columns[0][0], grid.columns[1][1]
    beyond = grid.columns[0][1]
    assert next_hop(grid, source, to, links(grid, source)) in row_mates(grid, source)
    assert next_hop(grid, source, to, {beyond}) == beyond
