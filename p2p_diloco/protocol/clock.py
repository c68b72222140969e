"""Swarm time, divided into rounds and cycles; deadlines are absolute.

`now_seconds` is swarm time: the local clock plus the median offset to the voters' clocks, self included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONTRIBUTE_SHARE = 0.5
"""Share of a round until which contributions are accepted."""
REDUCE_SHARE = 0.6
"""Share of a round after which a reducer averages the contributions that have arrived."""
FINISH_SHARE = 0.75
"""Share of a round after which an owner averages the row means that have arrived, if there is more than one row."""
LEAD_TURN_SHARE = 0.25
"""Share of a round that one leader's turn lasts."""
LEAD_TURNS = 4
TOLERANCE_SHARE = 1 / 8
"""Share of a round by which two peers' clocks may differ without harm to the round."""
SMALLEST_TOLERANCE_SECONDS = 0.5
_MOMENTS = (*(turn * LEAD_TURN_SHARE for turn in range(1, LEAD_TURNS + 1)), REDUCE_SHARE, FINISH_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClock:
    """Computes rounds, cycles and deadlines. All times are seconds of swarm time.

    Attributes:
        start_seconds: start of round 0.
        round_seconds: length of one round.
        num_fragments: rounds in a cycle; round r exchanges fragment `r mod num_fragments`.
    """

    start_seconds: float
    round_seconds: float
    num_fragments: int

    @property
    def tolerance_seconds(self) -> float:
        """Maximum difference between two members' clocks."""
        return max(TOLERANCE_SHARE * self.round_seconds, SMALLEST_TOLERANCE_SECONDS)

    def round_at(self, now_seconds: float) -> int:
        """Return the round in progress; negative before the start."""
        return math.floor((now_seconds - self.start_seconds) / self.round_seconds)

    def begin(self, round_index: int) -> float:
        """Return when a round begins, which is when the one before it ends."""
        return self.start_seconds + round_index * self.round_seconds

    def contribute_by(self, round_index: int) -> float:
        """Return the deadline for contributions."""
        return self.begin(round_index) + CONTRIBUTE_SHARE * self.round_seconds

    def reduce_by(self, round_index: int) -> float:
        """Return when reducers stop waiting."""
        return self.begin(round_index) + REDUCE_SHARE * self.round_seconds

    def finish_by(self, round_index: int) -> float:
        """Return when owners stop waiting for the means of other rows."""
        return self.begin(round_index) + FINISH_SHARE * self.round_seconds

    def moments(self, round_index: int) -> tuple[float, ...]:
        """Return when something is due after a round's start: the next leaders' turns, reducing, finishing, its end."""
        begin, length = self.begin(round_index), self.round_seconds
        return tuple(begin + share * length for share in _MOMENTS)

    def fragment(self, round_index: int) -> int:
        """Return the fragment that a round exchanges."""
        return round_index % self.num_fragments

    def cycle(self, round_index: int) -> int:
        """Return the cycle that a round belongs to."""
        return round_index // self.num_fragments

    def is_last_of_cycle(self, round_index: int) -> bool:
        """Return whether a round is the last of its cycle, in which the next roster is voted on."""
        return round_index % self.num_fragments == self.num_fragments - 1

    def closed_round(self, fragment: int, now_seconds: float) -> int:
        """Return the last round of `fragment` that is over; negative if there is none."""
        over = self.round_at(now_seconds) - 1
        return over - (over - fragment) % self.num_fragments

    def lead_turn(self, round_index: int, now_seconds: float) -> int:
        """Return the number of the leader's turn in progress, 0 to `LEAD_TURNS - 1`."""
        share = (now_seconds - self.begin(round_index)) / self.round_seconds
        return min(max(int(share / LEAD_TURN_SHARE), 0), LEAD_TURNS - 1)


def middle_two(offsets_seconds: Sequence[float]) -> tuple[float, float]:
    """Return the two middle offsets; for an odd number, the median twice.

    Both are within the range of the honest offsets while fewer than half of all are wrong in one direction.
    """
    offsets = sorted(offsets_seconds)
    return offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2]
