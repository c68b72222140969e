"""What one peer's line carries upwards, as far as it has shown: nothing is ever sent to find out.

A line that is never full shows nothing, and needs not: what is to be sent is through in time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 3.0
"""Long enough for a few vectors to come on a line that is worth a share."""
REMEMBERED_ROUNDS = 16
"""How long a line counts as thin that was full; then what is sent shows whether it still is."""
JUDGED_ROUNDS = 4
"""Of those in which it was full, the last ones say what it carries: a line may turn thin."""


class _Sample(NamedTuple):
    at: float
    bytes_read: float
    read_at: float
    is_waiting: bool


class LineRate:
    """Looks at what others have read, about once a second. Rates are of vectors, by the best window of a full line.

    Not at what was sent: daemons and systems take megabytes before a line has carried them. Peers that do not read make
    vectors wait as a thin line does; but then what others get within a window counts.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._best: dict[int, float] = {}

    def look(self, now: float, round_index: int, bytes_read: float, read_at: float, *, is_waiting: bool) -> None:
        """Take a look.

        Args:
            now: seconds of a clock that nobody sets.
            round_index: the current round.
            bytes_read: by others so far, as they count on the wire.
            read_at: seconds of the same clock; when they said so last. Vectors are long and come one by one: what came
                since the last one of the window before took as long as lies between the two, not between the looks.
            is_waiting: whether something is to be sent and is not.
        """
        if self._samples and now - self._samples[-1].at > WINDOW_SECONDS:
            self._samples.clear()  # the machine slept, or was too busy to look: nobody knows what waited meanwhile
        self._samples.append(_Sample(now, bytes_read, read_at, is_waiting))
        while len(self._samples) > 1 and self._samples[1].at <= now - WINDOW_SECONDS:
            self._samples.popleft()
        first = self._samples[0]
        if now - first.at >= WINDOW_SECONDS and all(sample.is_waiting for sample in self._samples):
            began = max(first.read_at, first.at - WINDOW_SECONDS / 2)  # before, nothing may have been sent at all
            seconds = max(read_at - began, WINDOW_SECONDS / 2)
            self._best[round_index] = max((bytes_read - first.bytes_read) / seconds, self._best.get(round_index, 0.0))
        full_in = [seen for seen in sorted(self._best) if seen > round_index - REMEMBERED_ROUNDS][-JUDGED_ROUNDS:]
        self._best = {seen: self._best[seen] for seen in full_in}

    def bytes_per_second(self) -> float | None:
        """Return what the line carries; None while it has not been full lately."""
        return max(self._best.values(), default=None)
