"""The cost of a cycle as a swarm grows: small sizes, exact claims."""

from __future__ import annotations

import pytest

from simulator import scale
from simulator.network import OUTBOUND_ONLY
from simulator.scale import ROUND_SECONDS, ScalePlan, ScaleRow, measure, scale_swarm


def bits(row: ScaleRow) -> float:
    return 8.0 * row.bytes_sent_per_parameter_per_cycle


@pytest.mark.long  # make size plays it
def test_a_row_of_eight_sends_what_the_formula_predicts() -> None:
    row = measure(ScalePlan(peers=8, parameters=1_000_000_000))
    assert (row.peers, row.rows, row.streams) == (8, 1, 7)
    assert row.included == 1.0
    assert row.replicas_equal
    assert row.newcomer_cycles is None
    # int4 with a 16-bit scale per 64: 4.25 bits, both ways, all but the own share; headers are negligible.
    assert bits(row) == pytest.approx(8.5 * (1 - 1 / 8), rel=0.01)
    assert row.round_seconds is not None
    assert 0 < row.round_seconds < 8
    assert measure(ScalePlan(peers=8, parameters=1_000_000_000)) == row, "one seed is one swarm"


@pytest.mark.long
def test_a_grid_sends_a_little_more_and_has_few_streams() -> None:
    row = measure(ScalePlan(peers=18, parameters=1_000_000_000, dial_out_only=0.3))
    assert row.rows == 2
    assert row.included == 1.0
    assert row.replicas_equal
    assert row.streams <= 17
    assert bits(row) < 1.2 * 8.5 * (1 - 1 / 8)
    assert row.control_bytes_per_cycle > 0
    assert row.messages > 0


@pytest.mark.long
async def test_rosters_are_certified_only_when_something_changes() -> None:
    async with scale_swarm(18) as swarm:
        for num_rounds in (8, 12):
            await swarm.run_to(num_rounds * ROUND_SECONDS)
            assert {machine.roster.k for machine in swarm.running()} == {2}, "all are listed, and make entries"


@pytest.mark.long
def test_a_newcomer_that_reaches_three_members_of_a_grid_becomes_a_member() -> None:
    row = measure(ScalePlan(peers=18, cycles=5, newcomer_reaches=3))
    assert row.newcomer_cycles is not None
    assert row.included > 0.99


@pytest.mark.long
def test_a_newcomer_that_reaches_no_peer_of_its_row_becomes_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held all spans, and waited forever for a peer of that row to name them."""
    monkeypatch.setattr(scale, "GROUP_SIZE", 4)
    row = measure(ScalePlan(peers=24, cycles=3, newcomer_reaches=3, seed=1))
    assert row.rows == 5
    assert row.newcomer_cycles is not None


@pytest.mark.long
def test_a_newcomer_that_reaches_one_member_gets_answers_of_voters_without_a_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That member was linked with fewer than half of them; the newcomer waited for as long as a stall takes."""
    monkeypatch.setattr(scale, "GROUP_SIZE", 4)
    row = measure(ScalePlan(peers=24, cycles=3, newcomer_reaches=1, seed=2))
    assert row.newcomer_cycles is not None


async def test_a_share_of_the_peers_cannot_be_dialled() -> None:
    async with scale_swarm(10, dial_out_only=0.3) as swarm:
        assert sum(machine.place == OUTBOUND_ONLY for machine in swarm.machines.values()) == 3
