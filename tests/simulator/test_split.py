"""Swarms that are cut in two."""

from __future__ import annotations

import dataclasses
import json

import pytest

from simulator.simulation import Simulation
from simulator.split import SplitPlan, play_split, splits_of

pytestmark = pytest.mark.story


@pytest.mark.parametrize("share", [0.5, pytest.param(0.25, marks=pytest.mark.long)])
def test_a_short_split_heals_without_a_fork(share: float) -> None:
    row = play_split(SplitPlan(peers=8, share=share, cycles=3.0, may_fork=False, seed=1))
    assert (row.degraded, row.branches, row.chains) == (0, 1, 1)
    assert row.reports >= 2
    assert row.healed_cycles is not None
    assert 0 < row.healed_cycles <= 2
    assert row.kept_its_promise


@pytest.mark.slow
def test_after_a_long_split_all_peers_hold_the_state_of_one_side() -> None:
    row = play_split(SplitPlan(peers=6, share=0.5, cycles=12.0, may_fork=True, seed=1))
    assert row.degraded >= 1
    assert row.branches == 2
    assert row.chains == 1
    assert row.healed_cycles is not None
    assert row.healed_cycles <= 4
    assert row.kept_its_promise


@pytest.mark.slow
def test_a_fork_that_is_not_allowed_breaks_the_promise() -> None:
    row = play_split(SplitPlan(peers=4, share=0.5, cycles=12.0, may_fork=False, seed=1))
    assert row.degraded >= 1
    assert not row.kept_its_promise


@pytest.mark.slow
def test_a_swarm_that_never_heals_is_reported_in_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "heal", lambda self: None)
    row = play_split(SplitPlan(peers=4, share=0.5, cycles=1.0, may_fork=True, seed=1))
    assert row.healed_cycles is None
    assert not row.kept_its_promise
    assert "null" in json.dumps(dataclasses.asdict(row), allow_nan=False)


def test_three_splits_are_run() -> None:
    assert len(splits_of(8)) == 3
