"""Name the members with more influence than their share, with the figure, as far as this peer can see it.

A member holds much of the weight of the means; a contributor claims norms that are always clipped, or points against
the others; an owner signs entries that point against what this peer contributed. The first may be an honest fast
island: a sentence says what is so, and people decide. Nothing here changes what a peer does. See
docs/decisions/weights-and-influence.md.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.wire.entry import Entry, included_places
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.rate import counted, format_part

LARGEST_SHARE = 1 / 3
"""Share of the weight above which a member is named."""
MOST_OF_EQUAL = 1.45
"""Multiple of an equal share above which it is, where an equal share is large: of two 73 %, of three 48 %."""
SHARE_CYCLES = 3
"""Cycles over which shares of the weight are averaged: who was late has the tokens of many cycles in one."""
CLIPPED_RATIO = 2.0
"""A claimed norm above this multiple of the limit is clipped by more than half."""
CLIPPED_CYCLES, AGAINST_CYCLES, LEFT_OUT_CYCLES = (8, 12), (3, 6), (3, 6)
"""In how many cycles, of how many, something must be so."""
DEVIATIONS = 3.0
"""A cosine counts beyond this many standard deviations of those of unrelated vectors."""
FAVOURED = 1.25
"""A contributor with this multiple of its usual share at one owner may have claimed something else to that owner."""
FORGOTTEN_CYCLES = 8
"""Number of cycles after which a peer is not named any more, if what was reported about it no longer holds."""


class Agreement(NamedTuple):
    """Agreement of entries with this peer's contributions: the sum of cosines, their number, and their variance.

    Each entry counts the same, so that long ones do not outvote the others. The cosine of two unrelated vectors of n
    elements has a variance of 1/n.
    """

    cosines: float = 0.0
    entries: int = 0
    variance: float = 0.0

    def joined(self, other: Agreement) -> Agreement:
        """Return the agreement of both."""
        return Agreement(self.cosines + other.cosines, self.entries + other.entries, self.variance + other.variance)

    def cosine(self) -> float:
        """Return the mean cosine; 0 without entries."""
        return self.cosines / max(self.entries, 1)

    def sign(self) -> int:
        """Return 1 or -1 if the cosine is clear, otherwise 0."""
        is_unclear = abs(self.cosines) <= DEVIATIONS * math.sqrt(self.variance)
        return 0 if is_unclear else 1 if self.cosines > 0.0 else -1


@dataclass(slots=True)
class _Account:
    """Weights by an owner's entries: sums of shares by member, and the number of entries by that of contributors."""

    shares: dict[PeerId, float] = field(default_factory=dict)
    sizes: Counter[int] = field(default_factory=Counter)

    def share(self, peer: PeerId) -> float:
        """Return the mean share of a member."""
        return self.shares.get(peer, 0.0) / max(self.sizes.total(), 1)


@dataclass(slots=True)
class _Seen:
    """Observations of one cycle: weights and agreement by owner, claimed norms and who was left out by contributor."""

    accounts: dict[PeerId, _Account] = field(default_factory=dict)
    claims: dict[PeerId, list[float]] = field(default_factory=dict)
    agreements: dict[PeerId, Agreement] = field(default_factory=dict)
    left_out: dict[PeerId, list[bool]] = field(default_factory=dict)


class _Named(NamedTuple):
    cycle: int
    text: str


_Found = list[tuple[tuple[str, PeerId], str]]


class Influence:
    """Watches weights, norms and directions cycle by cycle. A state machine without I/O.

    Args:
        me: this peer, whose own entries are the best account of weights.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._seen = _Seen()
        self._cycles: dict[tuple[str, PeerId], deque[bool]] = {}
        self._named: dict[tuple[str, PeerId], _Named] = {}
        self._past: deque[tuple[int, Mapping[PeerId, float], Mapping[PeerId, float]]] = deque(maxlen=SHARE_CYCLES)
        self.shares: Mapping[PeerId, float] = {}
        """Each member's share of the weight in the last cycles with entries."""
        self.claimed_shares: Mapping[PeerId, float] = {}
        """Its share of the members' tokens per second at the ends of these cycles, as each claims its own."""

    def named(self) -> tuple[str, ...]:
        """Return what is so at present, as sentences."""
        return tuple(named.text for _, named in sorted(self._named.items()))

    def entry_absorbed(self, entry: Entry, owner: PeerId, roster: Roster, newcomers: Collection[PeerId]) -> None:
        """Note the weights of an entry of this cycle. An entry with one contribution shows nothing.

        Args:
            newcomers: members whose weight was cut because they are new; they count at least as the median does.
        """
        peers = [roster.members[place].peer for place in included_places(entry)]
        if len(peers) < 2:
            return
        usual = median(entry.weights)
        weights = [
            max(weight, usual) if peer in newcomers else weight
            for peer, weight in zip(peers, entry.weights, strict=True)
        ]
        account, total = self._seen.accounts.setdefault(owner, _Account()), math.fsum(weights)
        account.sizes[len(peers)] += 1
        for peer, weight in zip(peers, weights, strict=True):
            account.shares[peer] = account.shares.get(peer, 0.0) + weight / total

    def contributed(self, peer: PeerId, claimed: float, limit: float, *, is_left_out: bool = False) -> None:
        """Note a contribution to a span that this peer averages.

        Args:
            claimed: its norm before clipping, as the contributor claims.
            is_left_out: whether it was left out because it points against the others.
        """
        self._seen.left_out.setdefault(peer, []).append(is_left_out)
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
            rates: tokens per second by peer, as their heartbeats report.
        """
        seen, self._seen = self._seen, _Seen()
        self._cycles = {key: cycles for key, cycles in self._cycles.items() if key[1] in members}
        rates = {peer: max(rate, 0.0) for peer, rate in rates.items() if peer in members}
        found = [*self._heavy(seen, cycle, rates), *self._clipped(seen), *self._against(seen), *self._left_out(seen)]
        found = [(key, text) for key, text in found if key[1] in members]
        reports = [Report(topic="influence", text=text) for key, text in found if key not in self._named]
        self._named.update((key, _Named(cycle, text)) for key, text in found)
        self._named = {
            key: one for key, one in self._named.items() if one.cycle > cycle - FORGOTTEN_CYCLES and key[1] in members
        }
        return reports

    def _heavy(self, seen: _Seen, cycle: int, rates: Mapping[PeerId, float]) -> _Found:
        """Return who holds much of the weight.

        An owner states the weights of its entries. This peer trusts its own; without them the median over others
        counts, so that one that lies blames nobody, and a sole owner's account only shows in `shares`.
        """
        accounts = seen.accounts
        if not accounts:
            self.shares = self.claimed_shares = {}
            return []
        trusted = [accounts[self._me]] if self._me in accounts else list(accounts.values())
        peers = sorted({peer for account in trusted for peer in account.shares})
        weights = {peer: median_low(account.share(peer) for account in trusted) for peer in peers}
        total = math.fsum(rates.values()) or 1.0
        self._past.append((cycle, weights, {peer: rate / total for peer, rate in rates.items()}))
        past = [shares for seen_in, *shares in self._past if seen_in > cycle - SHARE_CYCLES]
        self.shares, self.claimed_shares = map(_mean_shares, zip(*past, strict=True))
        if len(past) < SHARE_CYCLES or (self._me not in accounts and len(accounts) < 2):
            return []
        num = median_low(size for account in trusted for size in account.sizes.elements())
        limit, found = max(LARGEST_SHARE, MOST_OF_EQUAL / num), []
        for peer, share in self.shares.items():
            if share > limit:
                others = [rate for other, rate in rates.items() if other != peer and other in self.shares]
                text = (
                    f"{short_peer_id(peer)} has {share:.1%} of the weight of the mean of {counted(num, 'trainer')}; by "
                    f"its heartbeats it trains {rates.get(peer, 0.0):,.0f} tokens/s, the others "
                    f"{median(others or [0.0]):,.0f}: nobody can check that; where islands count by their tokens, keep "
                    "only one that you know to be so fast"
                )
                found.append((("heavy", peer), text))
        return found

    def _clipped(self, seen: _Seen) -> _Found:
        """Return who is clipped by more than half, while most others are not clipped at all."""
        ratios, found = {peer: median(claims) for peer, claims in seen.claims.items()}, []
        for peer, ratio in sorted(ratios.items()):
            others = [other for name, other in ratios.items() if name != peer]
            is_so = ratio > CLIPPED_RATIO and bool(others) and median(others) <= 1.0
            if self._lasts(("clipped", peer), is_so, *CLIPPED_CYCLES) and is_so:
                text = (
                    f"{short_peer_id(peer)} says that its contributions are {ratio:.3g} times as long as may be sent, "
                    f"in {counted(CLIPPED_CYCLES[0], 'cycle')}, while the others' are not clipped: it is far faster, "
                    "trains with far too large a rate, diverges, or lies"
                )
                found.append((("clipped", peer), text))
        return found

    def _against(self, seen: _Seen) -> _Found:
        """Return owners whose entries point against this peer's contributions, while those of most others do not.

        If most owners' do, what this peer contributes differs from the rest, or another contributor outweighs it.
        """
        signs, found = {owner: each.sign() for owner, each in seen.agreements.items()}, []
        for owner, sign in sorted(signs.items()):
            others = [other for name, other in signs.items() if name != owner]
            is_so = sign < 0 and 2 * sum(other > 0 for other in others) > len(others)
            if self._lasts(("against", owner), is_so, *AGAINST_CYCLES) and is_so:
                favoured = self._favoured(owner, seen.accounts)
                names = ", ".join(map(short_peer_id, favoured))
                why = f"; either it lies, or {names} does, which has far more weight in them" if favoured else ""
                text = (
                    f"{short_peer_id(owner)} signs entries that point against what this peer contributed to them "
                    f"(cosine {seen.agreements[owner].cosine():.2f}), in {counted(AGAINST_CYCLES[0], 'cycle')}, while "
                    f"other owners' do not{why}"
                )
                found.append((("against", owner), text))
        return found

    def _left_out(self, seen: _Seen) -> _Found:
        """Return whose contributions this peer leaves out of most means, because they point against the others'."""
        found = []
        for peer, verdicts in sorted(seen.left_out.items()):
            num = sum(verdicts)
            is_so = 2 * num > len(verdicts)
            if self._lasts(("left out", peer), is_so, *LEFT_OUT_CYCLES) and is_so:
                text = (
                    f"{short_peer_id(peer)} was left out of {format_part(num, len(verdicts), 'mean')} that this peer "
                    f"took in a cycle, and of most in {counted(LEFT_OUT_CYCLES[0], 'cycle')}, because its contribution "
                    "points against what the others have learnt: its owner should check its learning rate, text and "
                    "memory; if nobody can explain it, found the next run without it"
                )
                found.append((("left out", peer), text))
        return found

    @staticmethod
    def _favoured(owner: PeerId, accounts: Mapping[PeerId, _Account]) -> list[PeerId]:
        """Return the contributors that have more weight at an owner than at most others.

        One may have claimed to this owner alone that it has trained a lot, to outweigh all others there.
        """
        mine, others = accounts.get(owner), [each for name, each in accounts.items() if name != owner]
        if mine is None or not others:
            return []
        shares = {peer: (mine.share(peer), median(each.share(peer) for each in others)) for peer in sorted(mine.shares)}
        return [peer for peer, (here, usual) in shares.items() if peer != owner and here > FAVOURED * usual]

    def _lasts(self, key: tuple[str, PeerId], is_so: bool, fewest: int, of: int) -> bool:
        """Return whether something has been so in a number of the last cycles in which it could be seen."""
        cycles = self._cycles.setdefault(key, deque(maxlen=of))
        cycles.append(is_so)
        if not any(cycles):
            del self._cycles[key]
        return sum(cycles) >= fewest


def _mean_shares(past: Sequence[Mapping[PeerId, float]]) -> dict[PeerId, float]:
    """Return the mean over cycles, the newest last, of the shares of those that have one in the newest."""
    return {peer: math.fsum(shares.get(peer, 0.0) for shares in past) / len(past) for peer in past[-1]}
