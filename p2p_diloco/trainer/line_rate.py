"""What one peer's line carries upwards, as far as it has shown: nothing is ever sent to find out.

A line that is never full shows nothing, and needs not: what is to be sent is through in time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 3.0
"""Long enough that what the daemon and the system take at once, before the line has carried it, is not all of it."""
REMEMBERED_ROUNDS = 16


class _Sample(NamedTuple):
    at: float
    bytes_sent: float
    is_waiting: bool


class LineRate:
    """Looks at what was sent, about once a second. Rates are of vectors, by the best window of the last rounds.

    Peers that do not read make vectors wait as a thin line does; but then what others get within a window counts.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._best: dict[int, float] = {}
        self._full_in: int | None = None

    def look(self, now: float, round_index: int, bytes_sent: float, *, is_waiting: bool) -> None:
        """Take a look.

        Args:
            now: seconds of a clock that nobody sets.
            round_index: the current round.
            bytes_sent: so far, as they count on the wire.
            is_waiting: whether something is to be sent and is not.
        """
        if self._samples and now - self._samples[-1].at > WINDOW_SECONDS:
            self._samples.clear()  # the machine slept, or was too busy to look: nobody knows what waited meanwhile
        self._samples.append(_Sample(now, bytes_sent, is_waiting))
        while len(self._samples) > 1 and self._samples[1].at <= now - WINDOW_SECONDS:
            self._samples.popleft()
        first = self._samples[0]
        if now - first.at >= WINDOW_SECONDS:
            rate = (bytes_sent - first.bytes_sent) / (now - first.at)
            self._best[round_index] = max(rate, self._best.get(round_index, 0.0))
            if all(sample.is_waiting for sample in self._samples):
                self._full_in = round_index
        oldest = round_index - REMEMBERED_ROUNDS
        self._best = {seen: rate for seen, rate in self._best.items() if seen > oldest}
        if self._full_in is not None and self._full_in <= oldest:
            self._full_in = None

    def bytes_per_second(self) -> float | None:
        """Return what the line carries; None while it has not been full lately."""
        return max(self._best.values()) if self._full_in is not None else None
