"""A machine's two clocks."""

from __future__ import annotations

from p2p_diloco.testing.clock import MachineClock


def test_monotonic_clock_counts_from_the_boot() -> None:
    clock = MachineClock(1000.0)
    assert clock.monotonic(1005.0) == 5.0
    clock.boot(1010.0)
    assert clock.monotonic(1010.0) == 0.0


def test_monotonic_clock_stands_still_in_sleep_and_the_wall_clock_does_not() -> None:
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
