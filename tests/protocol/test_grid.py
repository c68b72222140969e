"""Who owns which span."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fake_run import RUN, peer_id
from hypothesis import given
from hypothesis import strategies as st
from made import ids, member, roster_of

from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.grid import fold_roster, grid_order


@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 64), st.integers(0, 7))
def test_every_span_has_exactly_one_owner_and_shares_are_equal(n: int, k: int, num_spans: int, fragment: int) -> None:
    grid = fold_roster(roster_of(n, k=k))
    owned = [span for peer in ids(n) for span in grid.owned(peer, fragment, num_spans)]
    assert sorted(owned) == [SpanId(fragment, index) for index in range(num_spans)]
    shares = Counter(grid.owner(span) for span in owned)
    assert max(shares.values()) - min((shares[peer] for peer in ids(n)), default=0) <= 1


@pytest.mark.parametrize("n", [1, 2, 5])
def test_owners_rotate_with_each_roster(n: int) -> None:
    owners = {fold_roster(roster_of(n, k=k)).owner(SpanId(0, 0)) for k in range(n)}
    assert owners == set(ids(n))


def test_only_members_that_can_be_dialled_own_spans() -> None:
    first, second = ids(2)
    roster = replace(roster_of(2), members=(member(first, dialable=False), member(second)))
    assert fold_roster(roster).reducers == (second,)


def test_the_hub_owns_all_while_nobody_can_be_dialled() -> None:
    grid = fold_roster(roster_of(3, dialable=False))
    assert grid.reducers == (peer_id("boot"),)


def test_a_lone_member_owns_all_itself() -> None:
    assert fold_roster(roster_of(1, dialable=False)).reducers == (ids(1)[0],)


def test_nobody_owns_anything_where_nobody_can_be_reached() -> None:
    grid = fold_roster(roster_of(2, dialable=False, helper=None))
    assert grid.owner(SpanId(0, 0)) is None
    assert grid.owned(ids(1)[0], 0, 4) == ()


@given(st.permutations(range(8)), st.integers(0, 50))
def test_grid_order_is_the_same_whatever_the_order_of_arrival(order: list[int], regrid: int) -> None:
    members = [member(peer, dialable=place % 2 == 0) for place, peer in enumerate(ids(8))]
    dealt = grid_order([members[place] for place in order], RUN, regrid)
    assert dealt == grid_order(members, RUN, regrid)
    assert [m.can_be_dialled for m in dealt] == [True] * 4 + [False] * 4


def test_grids_are_redrawn() -> None:
    members = [member(peer) for peer in ids(8)]
    assert len({grid_order(members, RUN, regrid) for regrid in range(8)}) > 4
