"""The pace of an island follows from its speed, within the limits of its batch."""

from __future__ import annotations

import pytest

from research.pace import Pace, pace_of


@pytest.mark.parametrize(
    ("speed", "limits", "windows", "steps"),
    [
        (1.0, (1.0, 1.0), 8, 1.0),
        (16.0, (1.0, 1.0), 8, 16.0),
        (16.0, (1.0, 4.0), 32, 4.0),
        (16.0, (1.0, 64.0), 128, 1.0),
        (0.1, (1.0, 1.0), 8, 0.1),
        (0.1, (1 / 64, 1.0), 1, 0.8),
        (0.01, (1 / 64, 1.0), 1, 0.08),
        (3.0, (1.0, 64.0), 32, 0.75),
    ],
)
def test_what_the_batch_does_not_take_is_more_steps_or_fewer(
    speed: float, limits: tuple[float, float], windows: int, steps: float
) -> None:
    smallest, largest = limits
    found = pace_of(speed, 8, largest=largest, smallest=smallest)
    assert found == Pace(windows=windows, steps=pytest.approx(steps))
