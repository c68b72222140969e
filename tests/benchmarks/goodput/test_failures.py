"""The cost of a failure: the arithmetic by hand, and small swarms in the simulator."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.goodput.failures import (
    CountedEntry,
    Failure,
    FailureCost,
    FailurePlan,
    Measured,
    cost_of,
    measured_row,
    single_failures,
    sustained_failures,
)
from p2p_diloco.ids import PeerId

PLAN = FailurePlan(
    islands=3, failures=1, pause_seconds=12.0, cycle_seconds=8.0, every_seconds=100.0, sustained_cycles=4
)
"""Eight spans in four rounds of 2 s: each entry of three islands names 3 islands of 1 s."""
A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def entries_of(round_index: int, *included: PeerId, count: int = 2, seconds: float | None = None) -> list[CountedEntry]:
    trained = seconds if seconds is not None else float(len(included))
    return [CountedEntry(round=round_index, included=frozenset(included), trained_seconds=trained)] * count


def test_an_undisturbed_swarm_loses_nothing() -> None:
    entries = [entry for round_index in range(-4, 12) for entry in entries_of(round_index, A, B, C)]
    failure = Failure(peer=A, returned=3, first=0, behind=8)
    assert cost_of(failure, entries, PLAN) == FailureCost(
        lost_seconds=0.0, others_seconds=0.0, skipped_cycles=0.0, stalled_rounds=0, rejoin_rounds=0
    )


def test_cost_worked_by_hand() -> None:
    # Two cycles of A, B and C: 48 island-seconds. A is gone in rounds 2 to 5 and back in round 6 with a second's work.
    failure = Failure(peer=A, returned=4, first=0, behind=8)
    entries = [
        *entries_of(0, A, B, C),
        *entries_of(1, A, B, C),
        *entries_of(2, B, C, count=1),  # A owned the other span
        # round 3 stalls
        *entries_of(4, B, C),
        *entries_of(5, B, C),
        *entries_of(6, A, B, C, seconds=2.5),
        *entries_of(7, A, B, C),
    ]
    # 6 + 6 + 2 + 0 + 4 + 4 + 5 + 6 = 33 seconds count. Of B and C, three entries of two seconds are missing.
    assert cost_of(failure, entries, PLAN) == FailureCost(
        lost_seconds=15.0, others_seconds=6.0, skipped_cycles=3 / 8, stalled_rounds=1, rejoin_rounds=2
    )


def test_an_island_that_is_not_included_again_is_counted_as_such() -> None:
    failure = Failure(peer=A, returned=4, first=0, behind=8)
    costs = (cost_of(failure, entries_of(1, A, B, C), PLAN), cost_of(failure, entries_of(5, A, B, C), PLAN))
    assert [cost.rejoin_rounds for cost in costs] == [None, 1]
    row = measured_row(PLAN, Measured(islands=3, costs=costs, sustained_failures=2, sustained_share=0.5))
    assert (row["failures"], row["not_rejoined"], row["rejoin_rounds"], row["most_rejoin_rounds"]) == (2, 1, 1, 1)
    assert (row["lost_seconds"], row["lost_seconds_error"]) == (42.0, 0.0)
    # Of 3 islands for 4 cycles of 8 s, two failures take 42 s each.
    assert row["expected_share"] == pytest.approx(1 - 84 / 96)


def test_one_failure_of_one_has_no_error() -> None:
    costs = (cost_of(Failure(peer=A, returned=4, first=0, behind=8), [], PLAN),)
    row = measured_row(PLAN, Measured(islands=3, costs=costs, sustained_failures=0, sustained_share=1.0))
    assert (row["lost_seconds_error"], row["rejoin_rounds"], row["most_rejoin_rounds"]) == (None, None, None)


def test_simulated_island_loses_its_pause_and_comes_back() -> None:
    plan = dataclasses.replace(PLAN, cycle_seconds=16.0)
    (cost,) = single_failures(plan)
    assert plan.pause_seconds < cost.lost_seconds < plan.pause_seconds + 3 * plan.cycle_seconds
    assert 0.0 <= cost.others_seconds < cost.lost_seconds - plan.pause_seconds
    assert cost.rejoin_rounds is not None


def test_all_training_counts_until_failures_keep_coming() -> None:
    plan = dataclasses.replace(PLAN, cycle_seconds=16.0, every_seconds=1e9)
    num_failures, share = sustained_failures(plan)
    assert (num_failures, share) == (0, pytest.approx(1.0, abs=0.01))
    num_failures, share = sustained_failures(dataclasses.replace(plan, every_seconds=20.0))
    assert num_failures > 0
    assert 0.0 <= share < 0.9
