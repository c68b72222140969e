"""The members that this peer's own entries include, compared with those of others: the log shows whose ways are poor.

A reducer whose line is quick enough may still be far from the others, by ways that lose packets. Vectors reach it late
and its entries leave members out, which no rate shows. It then averages less, on its own word: nobody gains from that,
and no single member can cause it by keeping its vectors from one reducer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire.member import FULL_SHARE

JUDGED_CYCLES = 2
POOR = 0.85
"""Share of own entries that include a member, relative to that of others' entries, below which it is left out here."""
FEWEST_ENTRIES = 4
"""Minimum number of entries, on either side of a comparison, that list a member."""
MOST_LEFT_OUT, MOST_LEFT_OUT_SHARE = 1, 0.25
"""Number and share of the other members that may be left out: they may do so on purpose."""
FIRST_REST_CYCLES, LAST_REST_CYCLES = 16, 256
"""Cycles after which a larger share is tried again; they double with each time that it was too large."""


@dataclass(slots=True)
class _Side:
    """Entries by member: those that list it, and those that include it."""

    listing: Counter[PeerId] = field(default_factory=Counter)
    including: Counter[PeerId] = field(default_factory=Counter)

    def share(self, peer: PeerId) -> float:
        return self.including[peer] / self.listing[peer]


class InclusionLog:
    """Chooses this peer's share of averaging by the entries of this and of other owners. A state machine without I/O.

    Attributes:
        share: the share, in the units of a roster.
    """

    def __init__(self, me: PeerId) -> None:
        self.share = FULL_SHARE
        self._me = me
        self._own, self._others = _Side(), _Side()
        self._began: int | None = None
        self._tried_at = 0
        self._rest_cycles = FIRST_REST_CYCLES

    def entry_absorbed(self, *, is_own: bool, included: Collection[PeerId], listed: Collection[PeerId]) -> None:
        """Note which of the listed trainers an entry includes."""
        side = self._own if is_own else self._others
        side.listing.update(listed)
        side.including.update(included)

    def cycle_over(self, cycle: int) -> None:
        """Judge every few cycles: halve the share if own entries leave several out; double it again after a rest."""
        if self._began is None or cycle < self._began:
            self._began = cycle
        compared = [
            peer
            for peer, listing in self._own.listing.items()
            if peer != self._me and min(listing, self._others.listing[peer]) >= FEWEST_ENTRIES
        ]
        if cycle - self._began < JUDGED_CYCLES or not compared:
            return
        num_left_out = sum(self._own.share(peer) < POOR * self._others.share(peer) for peer in compared)
        if num_left_out > max(MOST_LEFT_OUT, MOST_LEFT_OUT_SHARE * len(compared)):
            if self.share > 1:
                self.share //= 2
                self._tried_at = cycle + self._rest_cycles
                self._rest_cycles = min(2 * self._rest_cycles, LAST_REST_CYCLES)
        elif self.share < FULL_SHARE and cycle >= self._tried_at:
            self.share = min(2 * self.share, FULL_SHARE)
            self._tried_at = cycle + FIRST_REST_CYCLES
        self._own, self._others, self._began = _Side(), _Side(), cycle
