"""The number of requests under way: as many as the line can answer in good time, and no more.

On a thin line, requests wait for each other. If there are too many, all seem unanswered and are repeated to other
donors, and the line carries everything twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from p2p_diloco.ids import PeerId, SpanId

MOST_REQUESTS = 64
LONGEST_PATIENCE = 4.0
"""Longest time to wait for an answer, as a multiple of the initial time. It applies where answers take long, and to a
donor that answers other requests meanwhile. After it, a request counts as lost."""
LONGEST_ANSWER_SECONDS = 20.0
"""That time is at least so long. A link loses no request, but packets sent again, and pieces of spans before it, can
delay an answer by ten seconds."""
SHORTEST_WINDOW = 2.0
"""Smallest window. With one request at a time, the line is idle while the next one is on its way."""
FIRST_WINDOW = 4.0
SHRINKS_TO = 0.7
SLOW = 2.0
PATIENCE = 2.0
WEIGHT_OF_LATEST = 0.25
WAYS = 2.0


class Window:
    """The window of one kind of requests. A state machine without I/O.

    Args:
        seconds: initial time that an answer may take; longer once answers are known to take longer.
        target_seconds: time that an answer should take, because an answer delays everything after it in the line.
        leaves_out_way: whether that is in addition to twice the quickest answer: the way there and back, and once more
            for lost packets. A long line is not a thin one: small answers that all take half a second leave it empty.
    """

    def __init__(self, *, seconds: float, target_seconds: float, leaves_out_way: bool = False) -> None:
        self._seconds = seconds
        self.longest_seconds = max(LONGEST_PATIENCE * seconds, LONGEST_ANSWER_SECONDS)
        self._target_seconds = target_seconds
        self._size = FIRST_WINDOW
        self._usual_seconds = 0.0
        self._least_seconds = math.inf if leaves_out_way else 0.0

    @property
    def size(self) -> int:
        """Maximum number of requests under way."""
        return int(self._size)

    @property
    def seconds(self) -> float:
        """Time that an answer may take."""
        return min(max(self._seconds, PATIENCE * self._usual_seconds), self.longest_seconds)

    def answered(self, took_seconds: float) -> None:
        """Adjust to an answer: a quick one allows more requests, a slow one fewer.

        One that took longer than the longest time was lost on the way; it counts as that time.
        """
        took_seconds = min(max(took_seconds, 0.0), self.longest_seconds)
        self._usual_seconds += WEIGHT_OF_LATEST * (took_seconds - self._usual_seconds)
        self._least_seconds = min(self._least_seconds, took_seconds)
        waited_seconds = took_seconds - WAYS * self._least_seconds
        if waited_seconds < self._target_seconds:
            self._size = min(self._size + 1.0, float(MOST_REQUESTS))
        elif waited_seconds > SLOW * self._target_seconds:
            self._size = max(SHRINKS_TO * self._size, SHORTEST_WINDOW)

    def unanswered(self) -> None:
        """Adjust to a request that was not answered."""
        self._size = max(self._size / 2.0, SHORTEST_WINDOW)


def hash_rank(span: SpanId, donor: PeerId) -> int:
    """Return a number that spreads spans over equally loaded donors, the same on every machine.

    It is a product: with a sum, all spans would rank the donors alike and go to the same one.
    """
    return (donor[0] * 257 + donor[1] + 1) * (span.index * 31 + span.fragment * 7 + 1) % 65521


def least_loaded(span: SpanId, free: Sequence[PeerId], load: Mapping[PeerId, int]) -> PeerId:
    """Return the donor to ask for a span: the one with the fewest requests."""
    return min(free, key=lambda donor: (load[donor], hash_rank(span, donor)))
