"""For how long something has held without a break."""

from __future__ import annotations

import math


class Stopwatch:
    """Measures for how long a condition has held, as far as was noted."""

    def __init__(self) -> None:
        self._since = math.inf

    def note(self, holds: bool, now: float) -> float:
        """Note whether the condition holds now. Return for how long it has held; minus infinity if it does not."""
        self._since = min(self._since, now) if holds else math.inf
        return now - self._since

    @property
    def runs(self) -> bool:
        """Return whether the condition held when it was last noted."""
        return self._since < math.inf

    def seconds(self, now: float) -> float:
        return now - self._since
