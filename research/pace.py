"""Islands of different speed: how many steps each makes in a tick, and of which batch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The training of one island.

    Attributes:
        windows: windows of a step.
        steps: steps in a tick.
    """

    windows: int
    steps: float


def pace_of(speed: float, batch: int, *, largest: float, smallest: float) -> Pace:
    """Return the pace of an island that trains on `speed × batch` windows in a tick.

    Its batch is the planned one times the power of two that is nearest to its speed, within limits, and at least one
    window. What is left of its speed is more steps, or fewer.

    Args:
        speed: windows of a tick, relative to the planned ones.
        batch: planned windows of a step.
        largest, smallest: largest and smallest batch, relative to the planned one.
    """
    factor = min(max(2.0 ** round(math.log2(speed)), smallest), largest)
    windows = max(1, round(batch * factor))
    return Pace(windows=windows, steps=speed * batch / windows)
