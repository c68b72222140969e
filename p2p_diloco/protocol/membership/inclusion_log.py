"""The members that this peer's own entries include, compared with those of others: the log shows whose ways are poor.

A reducer whose line is quick enough may still be far from the others, by ways that lose packets. Vectors reach it late
and its entries leave members out, which no rate shows. It then averages less, on its own word: nobody gains from that.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.protocol.wire.member import FULL_SHARE

JUDGED_CYCLES = 3
POOR, VERY_POOR = 0.85, 0.5
"""Inclusion relative to that of others' entries, below which the share is halved, or becomes the smallest."""
FEWEST_PLACES = 6
"""Minimum number of members, summed over entries, on either side of a comparison."""
FIRST_REST_CYCLES, LAST_REST_CYCLES = 16, 256
"""Cycles after which a larger share is tried again; they double with each time that it was too large."""


@dataclass(slots=True)
class _Count:
    """Members that entries include, and members that they could."""

    included: int = 0
    listed: int = 0

    @property
    def is_enough(self) -> bool:
        return self.listed >= FEWEST_PLACES

    @property
    def share(self) -> float:
        return self.included / self.listed


class InclusionLog:
    """Chooses this peer's share of averaging by the entries of this and of other owners. A state machine without I/O.

    Attributes:
        share: the share, in the units of a roster.
    """

    def __init__(self) -> None:
        self.share = FULL_SHARE
        self._own, self._others = _Count(), _Count()
        self._began: int | None = None
        self._tried_at = 0
        self._rest_cycles = FIRST_REST_CYCLES

    def entry_absorbed(self, *, is_own: bool, included: int, listed: int) -> None:
        """Note how many of the listed trainers an entry includes."""
        count = self._own if is_own else self._others
        count.included += included
        count.listed += listed

    def cycle_over(self, cycle: int) -> None:
        """Judge after every few cycles: a poor share is halved, a lowered one doubled after a rest."""
        if self._began is None or cycle < self._began:
            self._began = cycle
        if cycle - self._began < JUDGED_CYCLES or not (self._own.is_enough and self._others.is_enough):
            return
        own, others = self._own.share, self._others.share
        if own < POOR * others and self.share > 1:
            self.share = max(self.share // 2, 1) if own >= VERY_POOR * others else 1
            self._tried_at = cycle + self._rest_cycles
            self._rest_cycles = min(2 * self._rest_cycles, LAST_REST_CYCLES)
        elif own >= POOR * others and self.share < FULL_SHARE and cycle >= self._tried_at:
            self.share = min(2 * self.share, FULL_SHARE)
            self._tried_at = cycle + FIRST_REST_CYCLES
        self._own, self._others, self._began = _Count(), _Count(), cycle
