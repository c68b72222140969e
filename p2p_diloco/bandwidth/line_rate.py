"""Estimate the upload rate of one peer's uplink from its normal traffic, without sending probes.

An uplink that is never saturated gives no estimate, and needs none: everything is sent in time.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 3.0
"""Minimum time that an uplink must be saturated to count, and maximum time between two looks."""
REMEMBERED_ROUNDS, MOST_REMEMBERED_ROUNDS = 16, 64
"""Time for which a saturated uplink counts as slow; then everything is sent again, to probe whether it still is.

If it is, the time doubles: during a probe, entries of the spans that this peer averages arrive late.
"""
GROWTH, MOST_GROWTH = 1.2, 1.5
"""Factor by which a peer that averages nothing tries more in the first round after saturation; in each later round the
factor is `GROWTH` times as large, up to the second number. A rate is too low if it was measured while a connection
began, or while packets were sent again. Others wait for late vectors until the middle of a round, no longer."""
TRIED_ROUNDS = 4
"""During a probe, the share of averaging stays unchanged for this many rounds."""
JUDGED_ROUNDS = 4
"""The rate is taken from this many of the latest saturated rounds, since an uplink may become slower."""


class _Reading(NamedTuple):
    at: float
    num_bytes: float


class LineRate:
    """Measures the rate from the bytes that other peers have read, about once a second.

    The rate is that of vectors in the best stretch of a saturated uplink. Bytes sent would mislead: daemons and
    operating systems buffer megabytes before the uplink has carried them. Peers that do not read make vectors wait
    like a slow uplink does; the rate is then what the other peers read in that stretch.
    """

    def __init__(self) -> None:
        self._looked_at = self._read_at = float("-inf")
        self._full_since: float | None = None
        self._readings: deque[_Reading] = deque()
        self._best: dict[int, float] = {}
        self._round = 0
        self._rounds_since_full = 0
        self._remembered = REMEMBERED_ROUNDS
        self._tried_at: int | None = None
        self._before: float | None = None

    def look(self, now: float, round_index: int, bytes_read: float, read_at: float, *, is_waiting: bool) -> None:
        """Record one observation.

        Args:
            now: monotonic seconds.
            round_index: the current round.
            bytes_read: bytes read by others so far, as counted on the wire.
            read_at: time of their last acknowledgement, on the same clock. Vectors are long and arrive one at a time,
                so the time between two acknowledgements counts, not the time between two looks.
            is_waiting: whether vectors wait to be sent.
        """
        slept = (
            now - self._looked_at > WINDOW_SECONDS
        )  # or was too busy to look, so it is unknown what waited meanwhile
        self._looked_at = now
        self._rounds_since_full += round_index != self._round
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
        """Forget old rounds; probe less and less often while the uplink stays slow."""
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
        """Take the rate of the shortest stretch up to now that is long enough, if there is one."""
        last = self._readings[-1]
        while len(self._readings) > 1 and self._readings[1].at <= last.at - WINDOW_SECONDS:
            self._readings.popleft()
        first = self._readings[0]
        if last.at - first.at >= WINDOW_SECONDS:
            rate = (last.num_bytes - first.num_bytes) / (last.at - first.at)
            self._best[round_index] = max(rate, self._best.get(round_index, 0.0))
            self._rounds_since_full = 0

    def bytes_per_second(self) -> float | None:
        """Return the rate of the uplink; None if it was not saturated recently."""
        return max(self._best.values(), default=None)

    def bytes_per_second_to_try(self) -> float | None:
        """Return the rate to try where this peer averages nothing: ever higher until it is saturated again."""
        known = self.bytes_per_second()
        if known is None:
            return None
        return known * math.prod(min(GROWTH**number, MOST_GROWTH) for number in range(1, self._rounds_since_full + 1))

    def bytes_per_second_to_share(self) -> float | None:
        """Return the rate that sets the share of averaging; during the first rounds of a probe, the rate before it.

        Late entries delay all peers, late contributions only this one.
        """
        is_tried = self._tried_at is not None and self._round < self._tried_at + TRIED_ROUNDS
        return self._before if is_tried else self.bytes_per_second()
