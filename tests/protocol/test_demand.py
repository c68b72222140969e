"""The rate that a run needs: the formula against a count over real grids, and the rates that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_run import RUN, peer_id
from hypothesis import given
from hypothesis import strategies as st
from made import member, roster_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.round.traffic import (
    USABLE_SHARE,
    Encoded,
    Flow,
    contribution_budget,
    download_needed,
    entries_needed,
    exchange_flow,
    share_carried,
    upload_needed,
)
from p2p_diloco.protocol.wire.roster import grid_order

INT4 = Encoded(contribution=4.25, row_mean=8.25, entry=4.25)


BOOTSTRAP = peer_id("boot")


def grid_of(
    num_members: int, num_reducing: int, group_size: int, *, has_bootstrap: bool = False
) -> tuple[Grid, Sequence[PeerId]]:
    members = [member(peer_id(f"peer {place}"), reduces=place < num_reducing) for place in range(num_members)]
    listed = [*members, member(BOOTSTRAP, trains=False, counts=False)] if has_bootstrap else members
    roster = replace(roster_of(1), k=1, members=grid_order(listed, RUN, 0))
    return fold_roster(roster, group_size), [m.peer for m in members[:num_reducing]]


def counted(grid: Grid, num_spans: int, encoded: Encoded) -> dict[PeerId, dict[str, float]]:
    """Simulate one exchange message by message; return what each peer moves of a vector of `num_spans` equal spans.

    The bootstrap contributes nothing.
    """
    moved = {peer: dict.fromkeys(Flow.__slots__, 0.0) for row in grid.rows for peer in row}
    contribution, row_mean, entry = (x / num_spans for x in (encoded.contribution, encoded.row_mean, encoded.entry))

    def count(sender: PeerId, receiver: PeerId, ways: tuple[str, str], size: float) -> None:
        if sender != receiver:
            moved[sender][ways[0]] += size
            moved[receiver][ways[1]] += size

    for index in range(num_spans):
        span = SpanId(0, index)
        owner = grid.owner(span)
        assert owner is not None
        for row, members in enumerate(grid.rows):
            reducer = grid.column(span)[row]
            for peer in members:
                if peer != BOOTSTRAP:
                    count(peer, reducer, ("contributed", "gathered"), contribution)
                if peer != owner:
                    count(reducer, peer, ("handed_out", "followed"), entry)
            count(reducer, owner, ("handed_out", "gathered"), row_mean)
            count(owner, reducer, ("handed_out", "followed"), entry)
    return moved


@given(st.integers(1, 40), st.data(), st.integers(1, 16))
def test_the_formula_is_the_mean_of_what_is_counted_message_by_message(
    num_members: int, data: st.DataObject, group_size: int
) -> None:
    num_reducing = data.draw(st.integers(1, num_members))
    grid, reachable = grid_of(num_members, num_reducing, group_size)
    rows = len(grid.rows)
    if num_reducing % rows or num_members % rows:
        return  # shares differ by one then, and the mean only approximately matches
    moved = counted(grid, 4 * rows * len(grid.columns), INT4)
    for is_reachable in (True, False):
        peers = [peer for peer in moved if (peer in reachable) == is_reachable]
        if not peers:
            continue
        flow = exchange_flow(
            INT4, members=num_members, group_size=group_size, reachable=num_reducing, is_reachable=is_reachable
        )
        for name in Flow.__slots__:
            mean = sum(moved[peer][name] for peer in peers) / len(peers)
            assert getattr(flow, name) == pytest.approx(mean), name


@pytest.mark.parametrize(
    ("num_members", "num_reducing"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (7, 1), (40, 1)]
)
@pytest.mark.parametrize("group_size", [1, 2, 16])
def test_a_needed_bootstrap_reduces_but_contributes_nothing(
    num_members: int, num_reducing: int, group_size: int
) -> None:
    grid, reachable = grid_of(num_members, num_reducing, group_size, has_bootstrap=True)
    moved = counted(grid, len(grid.columns), INT4)
    for peer in moved.keys() - {BOOTSTRAP}:
        flow = exchange_flow(
            INT4, members=num_members, group_size=group_size, reachable=num_reducing,
            is_reachable=peer in reachable, has_bootstrap=True,
        )  # fmt: skip
        for name in Flow.__slots__:
            assert getattr(flow, name) == pytest.approx(moved[peer][name]), name


@pytest.mark.parametrize(("num_members", "num_reducing"), [(3, 3), (3, 2), (5, 5), (100, 2)])
def test_an_unneeded_bootstrap_changes_nothing(num_members: int, num_reducing: int) -> None:
    with_one, without = (
        exchange_flow(
            INT4, members=num_members, group_size=16, reachable=num_reducing, is_reachable=True, has_bootstrap=has_one
        )
        for has_one in (True, False)
    )
    assert with_one == without


@pytest.mark.parametrize(("num_members", "share"), [(4, 1), (4, 4), (8, 2), (3, 1), (2, 1)])
def test_the_formula_with_a_smaller_share_is_the_mean_over_all_turns(num_members: int, share: int) -> None:
    members = tuple(replace(member(peer_id(f"peer {n}")), share=share if n == 0 else 8) for n in range(num_members))
    grid = fold_roster(replace(roster_of(1), k=1, members=members), 16)
    moved = counted(grid, len(grid.turns), INT4)[members[0].peer]
    flow = exchange_flow(
        INT4, members=num_members, group_size=16, reachable=num_members, is_reachable=True,
        share=grid.share_of(members[0].peer),
    )  # fmt: skip
    for name in Flow.__slots__:
        assert getattr(flow, name) == pytest.approx(moved[name]), name


@pytest.mark.parametrize(
    ("line", "share"), [(5.0, 8), (2.0, 8), (1.5, 6), (1.05, 4), (0.95, 4), (0.5, 2), (0.25, 1), (0.01, 1), (0.0, 1)]
)
def test_a_share_is_what_fits_into_half_of_a_round(line: float, share: int) -> None:
    flow = exchange_flow(INT4, members=4, group_size=16, reachable=4, is_reachable=True)
    rate = line * flow.handed_out / (0.5 * 10.0)
    assert flow.gathered == flow.handed_out, "of a row, where both have four bits"
    assert share_carried(flow, 10.0, upload=rate, download=None) == share
    assert share_carried(flow, 10.0, upload=None, download=rate) == share
    assert share_carried(flow, 10.0, upload=2 * rate, download=rate) == share
    assert share_carried(flow, 10.0, upload=None, download=None) == 8


def test_a_peer_that_averages_nothing_has_a_full_share() -> None:
    home = exchange_flow(INT4, members=4, group_size=16, reachable=3, is_reachable=False)
    assert share_carried(home, 10.0, upload=1.0, download=1.0) == 8


@pytest.mark.parametrize(("members", "bits"), [(4, 6.375), (8, 7.4375), (16, 7.96875)])
def test_the_figures_of_one_row(members: int, bits: float) -> None:
    flow = exchange_flow(INT4, members=members, group_size=16, reachable=members, is_reachable=True)
    assert flow.sent == pytest.approx(bits)
    assert flow.received == pytest.approx(bits)


def test_lone_peers_and_peers_at_home_have_their_own_figures() -> None:
    alone = exchange_flow(INT4, members=1, group_size=16, reachable=1, is_reachable=True)
    assert (alone.sent, alone.received) == (0.0, 0.0)
    home = exchange_flow(INT4, members=8, group_size=16, reachable=2, is_reachable=False)
    assert (home.sent, home.received) == (4.25, 4.25)
    few = exchange_flow(INT4, members=8, group_size=16, reachable=2, is_reachable=True)
    assert few.sent > 3 * home.sent, "the few that can be dialled hand out to all"


FLOWS = st.builds(
    Flow, contributed=st.floats(1, 1e9), handed_out=st.floats(0, 1e9), gathered=st.floats(0, 1e9),
    followed=st.floats(1, 1e9),
)  # fmt: skip


@given(FLOWS, st.floats(0.05, 1e5))
def test_a_line_at_the_required_rate_carries_a_whole_contribution_and_a_slower_one_does_not(
    flow: Flow, round_seconds: float
) -> None:
    needed = upload_needed(flow, round_seconds)
    enough = contribution_budget(1.000001 * needed, round_seconds, handed_out=flow.handed_out)
    assert enough >= flow.contributed * (1 - 1e-6)
    less = contribution_budget(0.9 * needed, round_seconds, handed_out=flow.handed_out)
    assert less < flow.contributed


@given(FLOWS, st.floats(0.05, 1e5), st.floats(1e3, 1e9))
def test_what_fits_never_exceeds_the_line_and_reducing_has_priority(
    flow: Flow, round_seconds: float, rate: float
) -> None:
    budget = contribution_budget(rate, round_seconds, handed_out=flow.handed_out)
    carried = USABLE_SHARE * rate * round_seconds
    assert 0.0 <= budget <= carried / 2
    assert budget + flow.handed_out <= carried or budget == 0.0


@given(FLOWS, st.floats(0.05, 1e5))
def test_following_needs_only_the_rate_to_receive_all_entries(flow: Flow, round_seconds: float) -> None:
    assert entries_needed(flow, round_seconds) <= download_needed(flow, round_seconds)
    assert entries_needed(flow, round_seconds) > flow.followed / round_seconds
