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
TURN_SHARE = 0.25
"""Share of a long round that one leader's turn lasts."""
SHORTEST_TURN_SECONDS = 1.5
"""A ballot takes four messages one after the other, and voters wait for two of them before the next turn begins; on
lines that people have, one takes up to 0.4 s."""
TURNS_TO_SPREAD = 2
LEAD_TURNS = 4
"""Number of turns for which leaders are drawn at once."""
TOLERANCE_SHARE = 1 / 8
"""Share of a round by which two peers' clocks may differ without harm to the round."""
SMALLEST_TOLERANCE_SECONDS = 0.5
_ROUNDING = 1e-6


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

    def cycle_at(self, now_seconds: float) -> int:
        """Return the cycle in progress."""
        return self.cycle(self.round_at(now_seconds))

    def soon(self, now_seconds: float) -> float:
        """Return the deadline of a message that is worth sending within a round."""
        return now_seconds + self.round_seconds

    def contribute_by(self, round_index: int) -> float:
        """Return the deadline for contributions."""
        return self.begin(round_index) + CONTRIBUTE_SHARE * self.round_seconds

    def reduce_by(self, round_index: int) -> float:
        """Return when reducers stop waiting."""
        return self.begin(round_index) + REDUCE_SHARE * self.round_seconds

    def finish_by(self, round_index: int) -> float:
        """Return when owners stop waiting for the means of other rows."""
        return self.begin(round_index) + FINISH_SHARE * self.round_seconds

    def moments(self, now_seconds: float) -> tuple[float, ...]:
        """Return when something is due in this round: contributions, averaging, its end; and the next leader's turn."""
        current = self.round_at(now_seconds)
        next_turn = self.start_seconds + self.ballot_at(now_seconds) * self.turn_seconds
        dues = self.contribute_by(current), self.reduce_by(current), self.finish_by(current)
        return (*dues, self.begin(current + 1), next_turn)

    def fragment(self, round_index: int) -> int:
        """Return the fragment that a round exchanges."""
        return round_index % self.num_fragments

    def cycle(self, round_index: int) -> int:
        """Return the cycle that a round belongs to."""
        return round_index // self.num_fragments

    def closed_round(self, fragment: int, now_seconds: float) -> int:
        """Return the last round of `fragment` that is over; negative if there is none."""
        over = self.round_at(now_seconds) - 1
        return over - (over - fragment) % self.num_fragments

    @property
    def turn_seconds(self) -> float:
        """Length of one leader's turn, and so of a ballot: a quarter of a round, but not shorter than a ballot takes.

        A round that is itself shorter is meant for short lines.
        """
        return max(TURN_SHARE * self.round_seconds, min(self.round_seconds, SHORTEST_TURN_SECONDS))

    def ballot_at(self, now_seconds: float) -> int:
        """Return the number of the ballot in progress: 1 in the turn that begins with round 0."""
        return math.floor((now_seconds - self.start_seconds) / self.turn_seconds + _ROUNDING) + 1

    def ballot_round(self, ballot: int) -> int:
        """Return the round in which a ballot begins."""
        return math.floor((ballot - 1) * self.turn_seconds / self.round_seconds + _ROUNDING)

    def agreed_in(self, ballot: int) -> int:
        """Return the last round before what a ballot decides is in force everywhere: two turns after it began."""
        return math.ceil((ballot - 1 + TURNS_TO_SPREAD) * self.turn_seconds / self.round_seconds - _ROUNDING) - 1

    def lead_turn(self, ballot: int) -> int:
        """Return the place of a ballot's leader in the order of its draw, 0 to `LEAD_TURNS - 1`.

        Of the ballots in which rosters are voted on, each `LEAD_TURNS` in a row have all places, however many there are
        in a cycle.
        """
        turns = round(self.round_seconds / self.turn_seconds)
        cycle = self.cycle(self.ballot_round(ballot))
        last_round = (cycle + 1) * self.num_fragments - 1
        first = math.floor(last_round * self.round_seconds / self.turn_seconds + _ROUNDING) + 1
        return (ballot - first + cycle * turns) % LEAD_TURNS

    def ends_cycle(self, ballot: int) -> bool:
        """Return whether the last round of a cycle is in progress in a ballot's turn, so that a roster is voted on."""
        last = math.ceil(ballot * self.turn_seconds / self.round_seconds - _ROUNDING) - 1
        return self.cycle(last + 1) > self.cycle(self.ballot_round(ballot))


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


def middle_two(offsets_seconds: Sequence[float]) -> tuple[float, float]:
    """Return the two middle offsets; for an odd number, the median twice.

    Both are within the range of the honest offsets while fewer than half of all are wrong in one direction.
    """
    offsets = sorted(offsets_seconds)
    return offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2]
