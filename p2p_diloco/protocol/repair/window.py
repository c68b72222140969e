"""How many requests are under way at once: as many as the line answers in good time, and no more.

On a thin line requests wait for each other. Too many at once all look unanswered, are asked of others again, and the
line carries everything twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.ids import PeerId, SpanId

MOST_ASKED = 64
LONGEST_PATIENCE = 4.0
"""Answers may come to be given this many times as long as at first, and so may those of a donor that answers other
requests meanwhile; then the question counts as lost."""
SHORTEST_WINDOW = 2.0
"""One at a time leaves the line idle while the next question is on its way."""
FIRST_WINDOW = 4.0
SHRINKS_TO = 0.7
SLOW = 2.0
PATIENCE = 2.0
WEIGHT_OF_LATEST = 0.25


class Window:
    """One kind of requests. A value that learns; no I/O.

    Args:
        seconds: how long an answer may take; longer once answers are known to take longer here.
        target_seconds: what answers should take: what waits in a line holds up all that comes behind it.
    """

    def __init__(self, *, seconds: float, target_seconds: float) -> None:
        self._seconds = seconds
        self.longest_seconds = LONGEST_PATIENCE * seconds
        self._target_seconds = target_seconds
        self._size = FIRST_WINDOW
        self._usual_seconds = 0.0

    @property
    def size(self) -> int:
        """Requests that may be under way."""
        return int(self._size)

    @property
    def seconds(self) -> float:
        """How long an answer may take."""
        return min(max(self._seconds, PATIENCE * self._usual_seconds), self.longest_seconds)

    def answered(self, took_seconds: float) -> None:
        """Learn from an answer: quick ones make room for more requests, slow ones for fewer.

        One that took longer than any may was lost on the way, and says no more than that.
        """
        took_seconds = min(took_seconds, self.longest_seconds)
        self._usual_seconds += WEIGHT_OF_LATEST * (took_seconds - self._usual_seconds)
        if took_seconds < self._target_seconds:
            self._size = min(self._size + 1.0, float(MOST_ASKED))
        elif took_seconds > SLOW * self._target_seconds:
            self._size = max(SHRINKS_TO * self._size, SHORTEST_WINDOW)

    def unanswered(self) -> None:
        """Learn from a request that nobody answered."""
        self._size = max(self._size / 2.0, SHORTEST_WINDOW)


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request under way since `at`; it may be renewed up to `last`. `piece_bytes`: the length asked for."""

    donor: PeerId
    until: float
    last: float = math.inf
    at: float = math.inf
    piece_bytes: int = 0


def hash_rank(span: SpanId, donor: PeerId) -> int:
    """Return a number that deals spans over equally loaded donors, the same on every machine.

    A product: a sum would add the same number for each donor, and so deal every span to the same one.
    """
    return (donor[0] * 257 + donor[1] + 1) * (span.index * 31 + span.fragment * 7 + 1) % 65521


def least_loaded(span: SpanId, free: Sequence[PeerId], load: Mapping[PeerId, int]) -> PeerId:
    """Return whom to ask for a span: who is asked for least."""
    return min(free, key=lambda donor: (load[donor], hash_rank(span, donor)))
