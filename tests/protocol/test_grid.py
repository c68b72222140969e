"""The averaging groups and the owners of spans."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
from fake_run import RUN, peer_id
from hypothesis import given
from hypothesis import strategies as st
from made import founding, ids, member, roster_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.grid import Grid, deal_turns, fold_roster
from p2p_diloco.protocol.wire.member import FULL_SHARE, Member
from p2p_diloco.protocol.wire.roster import Roster, grid_order, keep_places

ROW = 16


def peers(count: int) -> list[PeerId]:
    return [peer_id(f"peer {place}") for place in range(count)]


def big_roster(num_members: int, num_reducing: int) -> Roster:
    members = [member(peer, reduces=place < num_reducing) for place, peer in enumerate(peers(num_members))]
    return replace(roster_of(1), members=grid_order(members, RUN, 0))


@st.composite
def grids(draw: st.DrawFn) -> tuple[Roster, Grid, int]:
    num_members = draw(st.integers(2, 200))
    num_reducing = draw(st.integers(1, num_members))
    group_size = draw(st.integers(1, 20))
    roster = big_roster(num_members, num_reducing)
    return roster, fold_roster(roster, group_size).turned(draw(st.integers(0, 500))), group_size


@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 64), st.integers(0, 7))
def test_in_one_row_every_span_has_one_owner_that_reduces_it(n: int, cycle: int, num_spans: int, fragment: int) -> None:
    grid = fold_roster(roster_of(n), ROW).turned(cycle)
    owned = [span for peer in ids(n) for span in grid.owned(peer, fragment, num_spans)]
    assert sorted(owned) == [SpanId(fragment, index) for index in range(num_spans)]
    shares = Counter(grid.owner(span) for span in owned)
    assert max(shares.values()) - min((shares[peer] for peer in ids(n)), default=0) <= 1
    assert all(grid.reduced(peer, fragment, num_spans) == grid.owned(peer, fragment, num_spans) for peer in ids(n))


@given(grids())
def test_rows_share_out_the_members_and_those_that_reduce_evenly(made: tuple[Roster, Grid, int]) -> None:
    roster, grid, group_size = made
    assert sorted(peer for row in grid.rows for peer in row) == sorted(roster.peers())
    sizes = [len(row) for row in grid.rows]
    assert max(sizes) - min(sizes) <= 1
    reducing = {m.peer for m in roster.members if m.reduces}
    if len(grid.rows) > 1:
        assert (
            max(sizes) <= max(group_size, math.isqrt(len(roster.members) - 1) + 1)
            or 2 * len(grid.rows) >= len(reducing) - 1
        )
        assert len(grid.columns) >= 2, "one reducer of a row may die"
    assert all(grid.row_of[peer] == place for place, row in enumerate(grid.rows) for peer in row)
    for column in grid.columns:
        assert [grid.row_of[peer] for peer in column] == list(range(len(grid.rows)))
        assert reducing.issuperset(column)


@given(grids(), st.integers(1, 64), st.integers(0, 7))
def test_in_a_grid_every_row_reduces_every_span_and_one_of_the_column_owns_it(
    made: tuple[Roster, Grid, int], num_spans: int, fragment: int
) -> None:
    roster, grid, _ = made
    spans = [SpanId(fragment, index) for index in range(num_spans)]
    for span in spans:
        assert grid.owner(span) in grid.column(span)
        assert [grid.reducer(span, row) for row in range(len(grid.rows))] == list(grid.column(span))
    reduced = Counter(span for peer in roster.peers() for span in grid.reduced(peer, fragment, num_spans))
    assert reduced == dict.fromkeys(spans, len(grid.rows))
    shares = Counter(grid.column_index(span) for span in spans)
    assert max(shares.values()) - min(shares[c] for c in range(len(grid.columns))) <= 1


def test_columns_align_and_a_peer_needs_two_root_n_links() -> None:
    roster = big_roster(1024, 1024)
    grid = fold_roster(roster, ROW)
    assert (len(grid.rows), len(grid.columns)) == (32, 32)
    assert {len(grid.neighbours(peer)) for peer in roster.peers()} == {62}
    fewer = fold_roster(big_roster(1024, 717), ROW)
    assert max(len(fewer.neighbours(peer)) for peer in peers(1024)) <= 2 * 32


def test_an_observer_is_assigned_to_a_row() -> None:
    grid = fold_roster(big_roster(64, 64), 4)
    stranger = peer_id("stranger")
    row = grid.row_for(stranger)
    assert grid.neighbours(stranger) == frozenset(grid.rows[row])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_owners_rotate_with_each_cycle(n: int) -> None:
    """Rosters change rarely, so they do not rotate the work."""
    grid = fold_roster(roster_of(n), ROW)
    assert {grid.turned(cycle).owner(SpanId(0, 0)) for cycle in range(n)} == set(ids(n))
    assert grid.turned(0) == grid


@given(grids(), st.integers(0, 500))
def test_a_rotation_moves_spans_and_no_member(made: tuple[Roster, Grid, int], cycle: int) -> None:
    roster, grid, group_size = made
    assert replace(grid.turned(cycle), rotation=0) == fold_roster(roster, group_size)


def test_in_a_grid_every_reducer_owns_spans_in_turn() -> None:
    grid = fold_roster(big_roster(36, 36), 6)
    owners = {grid.turned(cycle).owner(SpanId(0, index)) for cycle in range(36) for index in range(12)}
    assert owners == set(peers(36))


def test_only_members_that_reduce_own_spans() -> None:
    first, second = ids(2)
    roster = replace(roster_of(2), members=(member(second), member(first, reduces=False)))
    assert fold_roster(roster, ROW).reducers() == {second}


def test_all_members_reduce_if_none_is_marked_as_a_reducer() -> None:
    """They reduce by their own claim, since some member must: links will show whether it is true."""
    grid = fold_roster(roster_of(3, reduces=False), ROW)
    assert grid.reducers() == set(ids(3))
    assert grid.rows == (tuple(ids(3)),)
    assert {grid.owner(SpanId(0, index)) for index in range(3)} == set(ids(3))


def test_a_bootstrap_reduces_like_any_member() -> None:
    boot, ann = peer_id("boot"), ids(1)[0]
    members = (member(boot, trains=False, counts=False), member(ann, reduces=False))
    assert fold_roster(replace(roster_of(1), members=members), ROW).reducers() == {boot}


def test_the_founding_roster_is_a_grid_of_one() -> None:
    assert fold_roster(founding().roster, ROW).rows == ((peer_id("boot"),),)


@given(st.permutations(range(8)), st.integers(0, 50))
def test_grid_order_does_not_depend_on_the_order_of_arrival(order: list[int], drawing: int) -> None:
    members = [member(peer, reduces=place % 2 == 0) for place, peer in enumerate(ids(8))]
    dealt = grid_order([members[place] for place in order], RUN, drawing)
    assert dealt == grid_order(members, RUN, drawing)
    assert [m.reduces for m in dealt] == [True] * 4 + [False] * 4


def test_grids_are_redrawn() -> None:
    members = [member(peer) for peer in ids(8)]
    assert len({grid_order(members, RUN, drawing) for drawing in range(8)}) > 4


def drawn_members(places: set[int], reducing: int) -> list[Member]:
    everyone = peers(24)
    return [member(everyone[place], reduces=place % 3 < reducing) for place in sorted(places)]


@given(st.sets(st.integers(0, 23)), st.sets(st.integers(0, 23)), st.integers(0, 3), st.integers(0, 3))
def test_remaining_members_keep_their_places_as_far_as_gaps_allow(
    before: set[int], after: set[int], reducing_before: int, reducing_after: int
) -> None:
    old = grid_order(drawn_members(before, reducing_before), RUN, 0)
    new = drawn_members(after, reducing_after)
    order = keep_places(old, new, RUN, 0)
    assert sorted(order, key=lambda m: m.peer) == sorted(new, key=lambda m: m.peer)
    assert [m.reduces for m in order] == sorted((m.reduces for m in new), reverse=True)
    if reducing_before == reducing_after == 3 and len(before - after) <= len(after - before):
        assert all(order[place] == m for place, m in enumerate(old) if m in new), "newcomers fill the gaps"


# -- shares of averaging

SHARES = st.lists(st.integers(1, FULL_SHARE), min_size=1, max_size=20)


def with_shares(roster: Roster, shares: list[int]) -> Roster:
    members = tuple(replace(m, share=share) for m, share in zip(roster.members, shares, strict=False))
    return replace(roster, members=members)


@given(SHARES)
def test_each_place_has_as_many_turns_as_its_share(shares: list[int]) -> None:
    divisor = math.gcd(*shares)
    assert Counter(deal_turns(shares)) == {place: share // divisor for place, share in enumerate(shares)}


@given(SHARES)
def test_turns_are_spread_evenly_over_time(shares: list[int]) -> None:
    turns, total, had = deal_turns(shares), sum(shares), [0] * len(shares)
    for number, turn in enumerate(turns, 1):
        had[turn] += 1
        for count, share in zip(had, shares, strict=True):
            assert abs(count - number * share / total) <= 1.0 + len(shares) * share / total


@given(st.integers(1, 40), st.integers(1, FULL_SHARE))
def test_equal_shares_are_dealt_one_after_the_other(columns: int, share: int) -> None:
    assert deal_turns([share] * columns) == tuple(range(columns))


def test_a_peer_with_an_eighth_of_a_share_averages_an_eighth_as_often() -> None:
    owners: Counter[PeerId] = Counter()
    for cycle in range(1, 1 + 25 * 4):
        grid = fold_roster(with_shares(roster_of(4), [8, 8, 8, 1]), ROW).turned(cycle)
        owners.update(owner for index in range(4) if (owner := grid.owner(SpanId(cycle % 2, index))) is not None)
    counts = [owners[peer] for peer in ids(4)]
    assert sum(counts) == 25 * 4 * 4
    assert counts[3] == pytest.approx(counts[0] / 8, rel=0.15)
    assert counts[0] == pytest.approx(counts[1], rel=0.05)
    shares = [grid.share_of(peer) for peer in ids(4)]
    assert shares == pytest.approx([4 * share / 25 for share in (8, 8, 8, 1)])
    assert grid.share_of(peer_id("stranger")) == 0.0


@pytest.mark.parametrize("shares", [[8, 8, 8, 1], [8, 1, 1, 1], [4, 4, 3, 4]])
def test_no_span_stays_with_one_owner_beyond_its_share(shares: list[int]) -> None:
    """This matters if that owner is dead without being known to be."""
    grid = fold_roster(with_shares(roster_of(4), shares), ROW)
    for index in range(4):
        owners = [grid.turned(cycle).owner(SpanId(0, index)) for cycle in range(200)]
        longest = max(len(list(run)) for _, run in groupby(owners))
        assert longest <= max(1, max(shares) // 2), "where all others are thin, one of eight turns in eleven"


def test_a_column_has_the_shares_of_all_its_reducers() -> None:
    """A few thin lines, one in each column, must not leave all averaging to the last column."""
    roster = big_roster(64, 64)
    even = fold_roster(roster, 8)
    assert len(even.columns) == 8
    thin = {column[0] for column in even.columns[:7]}
    uneven = fold_roster(replace(roster, members=tuple(
        replace(m, share=1 if m.peer in thin else 8) for m in roster.members
    )), 8)  # fmt: skip
    dealt = Counter(uneven.turns)
    assert max(dealt.values()) / min(dealt.values()) < 1.2


@given(grids(), st.data(), st.integers(1, 64))
def test_with_any_shares_every_span_has_a_reducer_in_every_row(
    made: tuple[Roster, Grid, int], data: st.DataObject, num_spans: int
) -> None:
    roster, grid, group_size = made
    number = len(roster.members)
    shares = data.draw(st.lists(st.integers(0, FULL_SHARE), min_size=number, max_size=number))
    uneven = fold_roster(with_shares(roster, shares), group_size).turned(grid.rotation)
    assert (uneven.rows, uneven.columns) == (grid.rows, grid.columns), "who is linked with whom stays"
    assert set(uneven.turns) == set(range(len(grid.columns))), "nobody is left out"
    for span in (SpanId(2, index) for index in range(num_spans)):
        assert uneven.column(span) in grid.columns
        assert uneven.owner(span) in uneven.column(span)
