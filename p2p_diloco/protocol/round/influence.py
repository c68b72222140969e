"""Name the members with more influence than their share, with the figure, as far as this peer can see it.

A member holds much of the weight of the means; a contributor claims norms that are always clipped; an owner signs
entries that point against what this peer contributed. The first may be an honest fast island: a sentence says what is
so, and people decide. Nothing here changes what a peer does. See docs/decisions/0049-who-has-influence-is-named.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.wire.entry import Entry, included_places
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.rate import counted

LARGEST_SHARE = 1 / 3
"""Share of the weight above which a member is named."""
MOST_OF_EQUAL = 1.45
"""Multiple of an equal share above which it is, where an equal share is large: of two 73 %, of three 48 %."""
FEWEST_CYCLES, MOST_CYCLES = 2, 3
"""Cycles over which shares of the weight are averaged: who was late has the tokens of many cycles in one."""
CLIPPED_RATIO = 2.0
"""A claimed norm above this multiple of the limit is clipped by more than half."""
CLIPPED_CYCLES = 8
"""Number of cycles of clipping after which a contributor is named."""
AGAINST_CYCLES = 3
"""Number of cycles of entries against this peer's contributions after which an owner is named."""
DEVIATIONS = 3.0
"""A cosine counts from this many standard deviations of unrelated vectors on, which have 1 / sqrt(elements)."""
FORGOTTEN_CYCLES = 8
"""Number of cycles after which a peer is not named any more, if what was said of it is no longer so."""


class Agreement(NamedTuple):
    """Sums over elements of an entry and of this peer's contribution to it: products, squares, squares, their number.

    They are enough for the cosine of any number of spans together.
    """

    products: float = 0.0
    own_squares: float = 0.0
    entry_squares: float = 0.0
    elements: int = 0

    def joined(self, other: Agreement) -> Agreement:
        """Return the sums over both."""
        return Agreement(
            self.products + other.products,
            self.own_squares + other.own_squares,
            self.entry_squares + other.entry_squares,
            self.elements + other.elements,
        )

    def cosine(self) -> float:
        """Return the cosine; 0 if a vector is 0."""
        squares = self.own_squares * self.entry_squares
        return self.products / math.sqrt(squares) if squares > 0.0 else 0.0

    def sign(self) -> int:
        """Return 1 or -1 if the cosine is clear, otherwise 0."""
        cosine = self.cosine()
        return 0 if abs(cosine) * math.sqrt(self.elements) < DEVIATIONS else 1 if cosine > 0.0 else -1


@dataclass(slots=True)
class _Seen:
    """Observations of one cycle: shares of the weight by owner, claimed norms by contributor, agreement by owner."""

    shares: dict[PeerId, list[dict[PeerId, float]]] = field(default_factory=dict)
    claims: dict[PeerId, list[float]] = field(default_factory=dict)
    agreements: dict[PeerId, Agreement] = field(default_factory=dict)


class _Named(NamedTuple):
    cycle: int
    text: str


class Influence:
    """Watches weights, norms and directions cycle by cycle. A state machine without I/O."""

    def __init__(self) -> None:
        self._seen = _Seen()
        self._streaks: dict[tuple[str, PeerId], int] = {}
        self._named: dict[tuple[str, PeerId], _Named] = {}
        self._past: deque[Mapping[PeerId, float]] = deque(maxlen=MOST_CYCLES)
        self.shares: Mapping[PeerId, float] = {}
        """Each member's share of the weight in the last few cycles with entries."""

    def named(self) -> tuple[str, ...]:
        """Return what is so at present, as sentences."""
        return tuple(named.text for _, named in sorted(self._named.items()))

    def entry_absorbed(self, entry: Entry, owner: PeerId, roster: Roster, newcomers: Collection[PeerId]) -> None:
        """Note the weights of an entry. An entry with one contribution shows nothing.

        Args:
            newcomers: members whose weight was cut because they are new; they count at least as the median does.
        """
        peers = [roster.members[place].peer for place in included_places(entry)]
        if len(peers) > 1:
            usual = median(entry.weights)
            weights = {
                peer: max(weight, usual) if peer in newcomers else weight
                for peer, weight in zip(peers, entry.weights, strict=True)
            }
            total = math.fsum(weights.values())
            shares = {peer: weight / total for peer, weight in weights.items()}
            self._seen.shares.setdefault(owner, []).append(shares)

    def contributed(self, peer: PeerId, claimed: float, limit: float) -> None:
        """Note the norm before clipping that a contributor claims for a span that this peer averages."""
        if 0.0 < limit < math.inf:
            self._seen.claims.setdefault(peer, []).append(claimed / limit)

    def agreed(self, owner: PeerId, agreement: Agreement) -> None:
        """Note how an entry agrees with what this peer contributed to it."""
        before = self._seen.agreements.get(owner, Agreement())
        self._seen.agreements[owner] = before.joined(agreement)

    def cycle_over(self, cycle: int, members: Collection[PeerId], rates: Mapping[PeerId, float]) -> list[Report]:
        """Judge the cycle that is over; report what has begun to be so.

        Args:
            members: those of the roster in force; others are forgotten.
            rates: tokens per second by peer, as their heartbeats say.
        """
        seen, self._seen = self._seen, _Seen()
        self._streaks = {key: num for key, num in self._streaks.items() if key[1] in members}
        found = [*self._heavy(seen, rates), *self._clipped(seen), *self._against(seen)]
        reports = [Report(topic="influence", text=text) for key, text in found if key not in self._named]
        self._named.update((key, _Named(cycle, text)) for key, text in found)
        self._named = {key: one for key, one in self._named.items() if one.cycle > cycle - FORGOTTEN_CYCLES}
        return reports

    def _heavy(self, seen: _Seen, rates: Mapping[PeerId, float]) -> list[tuple[tuple[str, PeerId], str]]:
        """Return who holds much of the weight.

        An owner states the weights of its entries, so what counts is the median over owners: one that lies blames
        nobody.
        """
        entries = [entry for of_owner in seen.shares.values() for entry in of_owner]
        if not entries:
            return []
        peers = sorted({peer for entry in entries for peer in entry})
        now = {
            peer: median_low(
                math.fsum(entry.get(peer, 0.0) for entry in of_owner) / len(of_owner)
                for of_owner in seen.shares.values()
            )
            for peer in peers
        }
        self._past.append(now)
        self.shares = {peer: math.fsum(past.get(peer, 0.0) for past in self._past) / len(self._past) for peer in peers}
        if len(self._past) < FEWEST_CYCLES:
            return []
        num = median_low(len(entry) for entry in entries)
        limit, found = max(LARGEST_SHARE, MOST_OF_EQUAL / num), []
        for peer, share in self.shares.items():
            if share > limit:
                others = [rate for other, rate in rates.items() if other != peer and other in self.shares]
                text = (
                    f"{short_peer_id(peer)} has {share:.1%} of the weight of the mean of {counted(num, 'trainer')}; by "
                    f"its heartbeats it trains {rates.get(peer, 0.0):.3g} tokens/s, the others "
                    f"{median(others or [0.0]):.3g}: nobody can check how much a machine trains, so keep only one that "
                    "you know to be so fast"
                )
                found.append((("heavy", peer), text))
        return found

    def _clipped(self, seen: _Seen) -> list[tuple[tuple[str, PeerId], str]]:
        """Return who is clipped by more than half, while most others are not clipped at all."""
        ratios, found = {peer: median(claims) for peer, claims in seen.claims.items()}, []
        for peer, ratio in sorted(ratios.items()):
            others = [other for name, other in ratios.items() if name != peer]
            is_so = ratio > CLIPPED_RATIO and bool(others) and median(others) <= 1.0
            if self._lasts("clipped", peer, is_so) >= CLIPPED_CYCLES:
                text = (
                    f"{short_peer_id(peer)} says that its contributions are {ratio:.3g} times as long as may be sent, "
                    f"for {counted(CLIPPED_CYCLES, 'cycle')}, and the others' are not clipped: it diverges, trains "
                    "with far too large a rate, or lies"
                )
                found.append((("clipped", peer), text))
        return found

    def _against(self, seen: _Seen) -> list[tuple[tuple[str, PeerId], str]]:
        """Return owners whose entries point against this peer's contributions, while those of most others do not.

        If most owners' do, what this peer contributes differs from the rest, or another contributor outweighs it.
        """
        signs, found = {owner: each.sign() for owner, each in seen.agreements.items()}, []
        for owner, sign in sorted(signs.items()):
            others = [other for name, other in signs.items() if name != owner]
            is_so = sign < 0 and 2 * sum(other > 0 for other in others) > len(others)
            if self._lasts("against", owner, is_so) >= AGAINST_CYCLES:
                text = (
                    f"{short_peer_id(owner)} signs entries that point against what this peer contributed to them "
                    f"(cosine {seen.agreements[owner].cosine():.2f}), for {counted(AGAINST_CYCLES, 'cycle')}, while "
                    "other owners' do not: it may not sign the mean of what it receives"
                )
                found.append((("against", owner), text))
        return found

    def _lasts(self, kind: str, peer: PeerId, is_so: bool) -> int:
        """Return for how many cycles in a row, of those in which anything was seen, something has been so."""
        key = (kind, peer)
        num = self._streaks.get(key, 0) + 1 if is_so else 0
        self._streaks.pop(key, None)
        if num:
            self._streaks[key] = num
        return num
