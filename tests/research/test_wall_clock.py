"""Wall time from counted bytes, by hand."""

from __future__ import annotations

import pytest

from research.setting import Outcome, Setting
from research.wall_clock import tick_seconds, ticks_to_loss


def outcome(num_bytes: float, curve: tuple[tuple[int, float], ...] = ()) -> Outcome:
    return Outcome(name="row", seed=0, loss=1.0, tokens=1, bytes_sent_per_parameter=num_bytes, seconds=1.0, curve=curve)


@pytest.mark.parametrize(
    ("system", "num_bytes", "seconds"),
    [
        # 1,000 parameters, 100 ticks, 800 kbit/s: 100 bytes per parameter are 1 s in all, 0.01 s a tick.
        ("data-parallel", 300.0, 0.03),
        ("data-parallel", 100.0, 0.02),
        ("p2p-diloco", 100.0, 0.02),
        ("p2p-diloco", 400.0, 0.04),
        ("textbook-diloco", 100.0, 0.03),
        ("noloco", 300.0, 0.05),
    ],
)
def test_who_overlaps_waits_for_the_longer_and_who_blocks_for_both(
    system: str, num_bytes: float, seconds: float
) -> None:
    setting = Setting(name="row", system=system, ticks=100)
    took = tick_seconds(setting, outcome(num_bytes), parameters=1000, step_seconds=0.02, bits_per_second=800_000.0)
    assert took == pytest.approx(seconds)


def test_a_loss_is_reached_between_two_points() -> None:
    watched = outcome(1.0, ((10, 3.0), (20, 2.0), (30, 1.5)))
    assert ticks_to_loss(watched, 2.5) == 15.0
    assert ticks_to_loss(watched, 1.5) == 30.0
    assert ticks_to_loss(watched, 3.5) == 10.0
    assert ticks_to_loss(watched, 1.4) is None
    assert ticks_to_loss(outcome(1.0), 2.0) is None
