"""Swarm time of a staged peer runs only in its turns. That such peers exchange is tested with the benchmarks."""

from __future__ import annotations

import time

import pytest

from benchmarks.staged_peer import StageClock, StagedSwarmClock
from p2p_diloco.ids import PeerId


def test_swarm_time_runs_from_an_agreed_moment() -> None:
    stage = StageClock(100.0)
    at = time.monotonic() + 50.0
    stage.set(200.0, at)
    assert stage.raw() == pytest.approx(150.0, abs=1.0)


def test_swarm_time_stops_at_the_end_of_a_turn() -> None:
    stage = StageClock(100.0)
    stage.set(200.0, time.monotonic() - 50.0, until=220.0)
    assert stage.raw() == 220.0
    assert stage.raw() == 220.0


def test_no_offset_to_others_goes_beyond_the_end_of_a_turn() -> None:
    stage = StageClock(100.0)
    clock, other = StagedSwarmClock(stage), PeerId(bytes(32))
    clock.follow((other,), is_source=True, takes_part=True)
    clock.take_answer(other, clock.new_request(other), 400.0)
    assert clock.now() > 200.0, "half of the way to the other's clock"
    stage.set(200.0, time.monotonic() - 50.0, until=220.0)
    assert clock.now() == 220.0
