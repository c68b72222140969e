"""From a scenario to its result: what is counted."""

from __future__ import annotations

import pytest

from simulator import trial
from simulator.scenario import draw_scenario
from simulator.trial import play_scenario


def test_all_checks_of_an_abandoned_quiet_time_count_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement is checked twice, then the progress of the run, the tables of each machine, and the clocks."""
    monkeypatch.setattr(trial, "LONGEST_SLEW_SECONDS", 0.0)  # no clocks are ever close enough
    scenario = draw_scenario(3, (3, 3), frozenset())
    result = play_scenario(scenario)
    assert result.invariant is None, result.text
    num_machines = 3 + scenario.bootstrap
    assert result.skipped == 2 * (3 - 1) + 1 + num_machines + 1
