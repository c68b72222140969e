"""Swarms of the size that a run is meant for, with the real frame limits; see research/lab-log.md for larger ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.command import MOST_JOIN_SECONDS, MOST_ROSTER_BYTES
from simulator.roster_cost import RosterPlan, measure_rosters
from simulator.scale import ScalePlan, measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_newcomer_that_reaches_three_of_130_members_joins_within_ten_cycles() -> None:
    """It reaches no peer of the row that it would be assigned to, and no voter."""
    row = measure(ScalePlan(peers=130, cycles=10, newcomer_reaches=3))
    print(row)
    assert row.newcomer_cycles is not None
    assert row.newcomer_cycles <= 10
    assert row.replicas_equal
    assert row.included > 0.99


def test_rosters_of_200_members_who_come_and_go_stay_within_the_limits(tmp_path: Path) -> None:
    cost = measure_rosters(RosterPlan(members=200, every=30, cycles=1000), tmp_path)
    print(cost)
    assert cost.rosters > 1000
    assert cost.is_within(MOST_ROSTER_BYTES, MOST_JOIN_SECONDS)
