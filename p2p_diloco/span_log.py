"""The log of one span in scalars: its tip, how an entry advances it, and the limits derived from it.

The limits bound what an entry may publish, and the weight and norm of one contribution. Numbers that are sent are
float32, so that the peer that computes one and those that check it use the same value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_diloco.ids import Digest, sha256

GENESIS_ROUND = -1
"""Round of a span that has not absorbed any entry."""

MAX_WEIGHT_RATIO = 4.0
"""Largest weight of a contribution, as a multiple of the last published median weight."""
MAX_NORM_RATIO = 4.0
"""Largest norm of a contribution, as a multiple of the last published radius; longer ones are clipped. The radius may
be the norm of a slow island, so with less an island that makes four times as many steps could not send what it has
learnt (docs/decisions/weights-and-influence.md)."""
LONGEST_BLOCK = 2.5
"""Largest length of 64 elements of a stranger's contribution, as a multiple of the median length of these elements; a
longer one counts for that much (docs/decisions/weights-and-influence.md)."""
REJECT_NORM_RATIO = 6.0
"""Largest norm of an entry, as a multiple of the last published radius; longer ones are refused. It is at least 1.5
times `MAX_NORM_RATIO`, because rounding to four bits lengthens a mean by up to a third."""
MOST_CLAIMED = 4.0
"""Largest norm that a contributor may claim for a vector before clipping, as a multiple of what was measured."""
RADIUS_MOVED, WEIGHT_MOVED = 1.5, 4.0
"""Largest factor by which a published median norm, or weight, may change from one entry of a span to the next."""
RADIUS_BOUNDS = (2.0**-20, 2.0**40)
"""Smallest and largest published median norm. Shorter norms do no harm, and from either end the radius returns to the
honest value within a hundred entries."""
WEIGHT_BOUNDS = (1.0, 2.0**64)
"""Smallest and largest weight. An island trains on at least one token per step, so no weight is less than 1."""
FOUNDING_RMS = 2.0**-4
"""A span's radius at its founding, per element (root mean square), so that even its first entry has a limit.

It is longer than most honest first contributions, and an entry of a few times as much slows an untrained model down
but does not ruin it. It suits every run, because each entry can change the radius by half (docs/decisions/learning.md).
"""
FOUNDING_WEIGHT = 2.0**16
"""A span's median weight at its founding. If all contributions exceed the limit that follows from it, all have the same
weight until the median has caught up."""
_LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHead:
    """The tip of one span's log.

    Attributes:
        digest: chain digest d, which identifies the entries absorbed. At founding: the content digest of the start.
        height: number of entries absorbed since founding.
        round: round of the last entry; `GENESIS_ROUND` before the first.
        roster: digest of the roster named in the last entry; the founding roster's before the first.
        radius: median norm of contributions published in the last entry; a constant at founding.
        median_weight: median weight of contributions published in the last entry; a constant at founding.
    """

    digest: Digest
    height: int
    round: int
    roster: Digest
    radius: float
    median_weight: float

    def norm_limit(self, ratio: float) -> float:
        """Return the largest norm that is accepted on top of this tip: a multiple of the published radius."""
        return ratio * self.radius


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedEntry:
    """The values of a valid entry that become part of the tip.

    Attributes:
        digest: the entry's digest.
        round: the entry's round.
        roster: digest of the roster named in it.
        radius: median norm published in it.
        median_weight: median weight published in it.
    """

    digest: Digest
    round: int
    roster: Digest
    radius: float
    median_weight: float


def chain_digest(parent: Digest, entry: Digest) -> Digest:
    """Return the chain digest after an entry: d ← H(d, entry digest)."""
    return sha256(parent, entry)


def advance_head(head: SpanHead, entry: AbsorbedEntry) -> SpanHead:
    """Return the tip after `entry`: its chain digest, height + 1, and the entry's published values."""
    return SpanHead(
        digest=chain_digest(head.digest, entry.digest),
        height=head.height + 1,
        round=entry.round,
        roster=entry.roster,
        radius=entry.radius,
        median_weight=entry.median_weight,
    )


def as_float32(value: float) -> float:
    """Return the nearest finite float32."""
    bounded = min(max(value, -_LARGEST_FLOAT32), _LARGEST_FLOAT32)
    return float(struct.unpack("<f", struct.pack("<f", bounded))[0])


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median: always one of the values, so half of the senders cannot raise it arbitrarily."""
    return sorted(values)[(len(values) - 1) // 2]


def counted_norm(claimed: float, measured: float) -> float:
    """Return the norm that counts for a contribution: the claimed one, between the measured one and four times it.

    What was sent may have been clipped, so it may have been longer before, but not shorter.
    """
    return as_float32(min(max(claimed, measured), MOST_CLAIMED * measured))


def median_around(values: Sequence[float], last: float) -> float:
    """Return the median of values; of an even number, the one of the two in the middle that is nearer to the last.

    So of two contributors neither alone raises or lowers it.
    """
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(max(last, low), high)


def within_reach(median: float, last: float, bounds: tuple[float, float], most_moved: float) -> float:
    """Return the value that an owner publishes for a median: the nearest one that may follow the last.

    A span's limits follow the published value. Without this bound, one entry could raise all limits, or move them to
    where no honest contribution fits; with it, they reach the honest value within a few entries from any value.

    Args:
        median: the median of this round.
        last: the value published by the previous entry, or at the founding. Any value has a valid successor.
        bounds: the smallest and largest value that may be published.
        most_moved: the largest factor between the two.
    """
    least, most = bounds
    last = min(max(last, least), most)
    return min(max(median, least, as_float32(last / most_moved)), most, as_float32(last * most_moved))


def founding_radius(elements: int) -> float:
    """Return the radius of a new span of that length."""
    return as_float32(FOUNDING_RMS * math.sqrt(elements))


def contribution_weight(tokens: int, most: float = WEIGHT_BOUNDS[1]) -> float:
    """Return the weight of a contribution: the tokens of this cycle, within bounds; 0 for an island without any.

    Args:
        most: see `weight_limit`.
    """
    if tokens <= 0:
        return 0.0
    return as_float32(min(max(float(tokens), WEIGHT_BOUNDS[0]), most))


def weight_limit(last_median: float, ratio: float) -> float:
    """Return the largest weight of a contribution: a multiple of the last published median."""
    return min(max(ratio * last_median, WEIGHT_BOUNDS[0]), WEIGHT_BOUNDS[1])


def most_among_strangers(weights: Sequence[float]) -> float:
    """Return the limit for the weights of a row of strangers: the lower median of those that count."""
    positive = [weight for weight in weights if weight > 0]
    return lower_median(positive) if positive else math.inf


def levelled(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of a row of strangers: none above their lower median.

    So a contributor may say that it trained on fewer tokens than most, and nobody gains by saying that it did on more.
    """
    most = most_among_strangers(weights)
    return tuple(min(weight, most) for weight in weights)
