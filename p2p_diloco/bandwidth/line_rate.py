"""What one peer's line carries upwards, as far as it has shown: nothing is ever sent to find out.

A line that is never full shows nothing, and needs not: what is to be sent is through in time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 3.0
"""A line is full for at least so long before it counts, and looks are no further apart."""
REMEMBERED_ROUNDS, MOST_REMEMBERED_ROUNDS = 16, 64
"""How long a line counts as thin that was full; then all is sent again, which shows whether it still is.

If so it counts as thin twice as long from then on: while it is tried, entries of what its peer averages come late.
"""
TRIED_ROUNDS = 4
"""So long what is averaged stays as it was when a line is tried."""
JUDGED_ROUNDS = 4
"""Of those in which it was full, the last ones say what it carries: a line may turn thin."""


class _Reading(NamedTuple):
    at: float
    num_bytes: float


class LineRate:
    """Looks at what others have read, about once a second. Rates are of vectors, by the best stretch of a full line.

    Not at what was sent: daemons and systems take megabytes before a line has carried them. Peers that do not read make
    vectors wait as a thin line does; but then what others get in such a stretch counts.
    """

    def __init__(self) -> None:
        self._looked_at = self._read_at = float("-inf")
        self._full_since: float | None = None
        self._readings: deque[_Reading] = deque()
        self._best: dict[int, float] = {}
        self._round = 0
        self._remembered = REMEMBERED_ROUNDS
        self._tried_at: int | None = None
        self._before: float | None = None

    def look(self, now: float, round_index: int, bytes_read: float, read_at: float, *, is_waiting: bool) -> None:
        """Take a look.

        Args:
            now: seconds of a clock that nobody sets.
            round_index: the current round.
            bytes_read: by others so far, as they count on the wire.
            read_at: seconds of the same clock; when they said so last. Vectors are long and come one by one: what came
                after one of them took as long as lies between it and the last one, not between looks.
            is_waiting: whether something is to be sent and is not.
        """
        slept = now - self._looked_at > WINDOW_SECONDS  # or was too busy to look: who knows what waited meanwhile
        self._looked_at = now
        if not is_waiting or slept:
            self._full_since = None
            self._readings.clear()
        elif self._full_since is None:
            self._full_since = now
        if self._full_since is not None and read_at > max(self._full_since, self._read_at):
            self._readings.append(_Reading(read_at, bytes_read))
            self._judge(round_index)
        self._read_at = max(read_at, self._read_at)
        self._round = round_index
        self._remember()

    def _remember(self) -> None:
        """Forget what was long ago; try the line less often the more often that showed it to be thin still."""
        known = self.bytes_per_second()
        full_in = [seen for seen in sorted(self._best) if seen > self._round - self._remembered][-JUDGED_ROUNDS:]
        self._best = {seen: self._best[seen] for seen in full_in}
        if known is not None and not full_in:
            self._tried_at, self._before = self._round, known
        elif self._tried_at is not None and full_in:
            self._tried_at, self._remembered = None, min(2 * self._remembered, MOST_REMEMBERED_ROUNDS)
        elif self._tried_at is not None and self._round >= self._tried_at + REMEMBERED_ROUNDS:
            self._tried_at, self._remembered = None, REMEMBERED_ROUNDS

    def _judge(self, round_index: int) -> None:
        """Take the rate of the shortest stretch up to now that is long enough, if any is."""
        last = self._readings[-1]
        while len(self._readings) > 1 and self._readings[1].at <= last.at - WINDOW_SECONDS:
            self._readings.popleft()
        first = self._readings[0]
        if last.at - first.at >= WINDOW_SECONDS:
            rate = (last.num_bytes - first.num_bytes) / (last.at - first.at)
            self._best[round_index] = max(rate, self._best.get(round_index, 0.0))

    def bytes_per_second(self) -> float | None:
        """Return what the line carries; None while it has not been full lately."""
        return max(self._best.values(), default=None)

    def bytes_per_second_to_share(self) -> float | None:
        """Return by what the share of averaging goes: the same, but that a line is tried for some rounds first.

        Entries that come late are late for all, contributions only for this peer.
        """
        is_tried = self._tried_at is not None and self._round < self._tried_at + TRIED_ROUNDS
        return self._before if is_tried else self.bytes_per_second()
