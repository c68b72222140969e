"""The clocks of a simulated machine."""

from __future__ import annotations

import pytest

from simulator.clock import MachineClock


def test_monotonic_clock_counts_from_boot() -> None:
    clock = MachineClock(1000.0)
    assert clock.monotonic(1005.0) == 5.0
    clock.boot(1010.0)
    assert clock.monotonic(1010.0) == 0.0


def test_monotonic_clock_stops_in_sleep_and_the_wall_clock_does_not() -> None:
    clock = MachineClock(1000.0)
    clock.sleep(1005.0)
    assert clock.monotonic(1500.0) == 5.0
    assert clock.wall(1500.0) == 1500.0
    clock.wake(2005.0)
    assert clock.monotonic(2006.0) == 6.0


def test_setting_the_wall_clock_leaves_the_monotonic_one_alone() -> None:
    clock = MachineClock(1000.0)
    clock.set_wall(1005.0, -3600.0)
    assert clock.wall(1005.0) == 1005.0 - 3600.0
    assert clock.monotonic(1005.0) == 5.0


def test_drift_runs_both_clocks_fast_and_true_at_undoes_it() -> None:
    clock = MachineClock(0.0, drift=0.5)
    assert clock.monotonic(10.0) == 15.0
    assert clock.true_at(18.0, 10.0) == 12.0
    assert clock.true_at(12.0, 10.0) == 8.0


def test_boot_time_clock_counts_sleep_and_restarts_at_boot() -> None:
    clock = MachineClock(1000.0)
    clock.sleep(1005.0)
    assert clock.boottime(1500.0) == 500.0
    clock.wake(2005.0)
    assert clock.boottime(2006.0) == 1006.0
    clock.boot(3000.0)
    assert clock.boottime(3001.0) == 1.0


def test_all_clocks_stop_in_a_pause_and_are_behind_after_it() -> None:
    clock = MachineClock(1000.0)
    clock.sleep(1001.0)
    clock.wake(1003.0)
    clock.pause(1005.0)
    clock.sleep(1050.0)
    assert [clock.monotonic(1100.0), clock.boottime(1100.0), clock.wall(1100.0)] == [3.0, 5.0, 1005.0]
    clock.wake(1105.0)
    assert [clock.monotonic(1106.0), clock.boottime(1106.0), clock.wall(1106.0)] == [4.0, 6.0, 1006.0]
    clock.wake(1107.0)
    clock.set_wall(1108.0, 0.0)
    assert clock.wall(1108.0) == 1108.0


def test_a_wall_clock_that_drifts_does_not_drift_in_a_pause() -> None:
    clock = MachineClock(0.0, drift=0.5)
    clock.pause(10.0)
    assert clock.wall(20.0) == 15.0
    clock.wake(20.0)
    assert clock.wall(20.0) == 15.0
    assert clock.wall(22.0) == 18.0


def test_wall_clock_is_behind_after_a_power_off_in_a_pause() -> None:
    clock = MachineClock(1000.0)
    clock.pause(1005.0)
    clock.boot(1105.0)
    assert [clock.monotonic(1106.0), clock.boottime(1106.0), clock.wall(1106.0)] == [1.0, 1.0, 1006.0]


def test_jumping_back_is_refused() -> None:
    clock = MachineClock(1000.0)
    clock.jump(1005.0, 7.0)
    assert [clock.monotonic(1005.0), clock.boottime(1005.0), clock.wall(1005.0)] == [12.0, 12.0, 1012.0]
    with pytest.raises(AssertionError, match="never goes back"):
        clock.jump(1006.0, -1.0)
