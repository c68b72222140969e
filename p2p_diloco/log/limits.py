"""Weights, medians and norms: what an entry may publish, and how much one contribution may count.

Numbers that travel are float32, so that the peer that computes one and those that check it see the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

MOST_MOVED = 4.0
"""Largest factor by which a published median may change from one entry of a span to the next."""
RADIUS_BOUNDS = (2.0**-20, 2.0**40)
"""Least and largest median norm that is published. Shorter norms do no harm, and from either end the radius is back at
the honest value within 30 entries."""
WEIGHT_BOUNDS = (1.0, 2.0**64)
"""Least and largest weight. An island trains on at least one token in each step, so none weighs less than 1."""
FOUNDING_RMS = 2.0**-4
"""A span's radius at its founding, per element (root mean square), so that even its first entry has a limit.

Longer than most honest first contributions, and four times it does no harm to a model that has learnt nothing yet. It
suits every run because the radius follows the honest value by a factor of four in each entry (docs/decisions/0028).
"""
FOUNDING_WEIGHT = 2.0**16
"""A span's median weight at its founding: that of one step of the smallest model that `new` offers.

If all trained on more than its limit allows, all weigh the same until the median has followed.
"""
_LARGEST_FLOAT32 = 3.4028234663852886e38


def as_float32(value: float) -> float:
    """Return the nearest finite float32."""
    bounded = min(max(value, -_LARGEST_FLOAT32), _LARGEST_FLOAT32)
    return float(struct.unpack("<f", struct.pack("<f", bounded))[0])


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median: always one of the values, so half of the senders cannot raise it at will."""
    return sorted(values)[(len(values) - 1) // 2]


def within_reach(median: float, last: float, bounds: tuple[float, float]) -> float:
    """Return what an owner publishes of a median: the nearest number that may follow the last one.

    A span's limits follow what it publishes. Otherwise one entry could lift all limits, or put them where nothing
    honest fits; as it is, they reach the honest value within a few entries from wherever they are.

    Args:
        median: of this round.
        last: what the previous entry published, or the founding. Whatever it is, some number may follow it.
        bounds: the least and the largest number that may ever be published.
    """
    least, most = bounds
    last = min(max(last, least), most)
    return min(max(median, least, last / MOST_MOVED), most, last * MOST_MOVED)


def founding_radius(elements: int) -> float:
    """Return the radius of a new span of that length."""
    return as_float32(FOUNDING_RMS * math.sqrt(elements))


def contribution_weight(tokens: int, steps: int, most: float = WEIGHT_BOUNDS[1]) -> float:
    """Return tokens² / steps, quantity times quality, within bounds; 0 for an island that made no step.

    Args:
        tokens, steps: of this cycle.
        most: see `weight_limit`.
    Source: Decoupled DiLoCo's weight: tokens trained on, times tokens per step.
    """
    if steps <= 0:
        return 0.0
    return as_float32(min(max(tokens * tokens / steps, WEIGHT_BOUNDS[0]), most))


def weight_limit(last_median: float, ratio: float) -> float:
    """Return the largest weight of a contribution: a multiple of the median that was published last."""
    return min(max(ratio * last_median, WEIGHT_BOUNDS[0]), WEIGHT_BOUNDS[1])


def rest_of_row(weights: Sequence[float]) -> float:
    """Return the most that the largest weight of a row may be: the sum of the others, if three or more count.

    Of two, the smaller weight would decide alone what both weigh.
    """
    positive = sorted(weight for weight in weights if weight > 0)
    return math.fsum(positive[:-1]) if len(positive) >= 3 else math.inf


def balanced(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of a row, none above the sum of the others if three or more count.

    So a contributor that claims any number of tokens has at most half of a mean, whatever was published before.
    """
    rest = rest_of_row(weights)
    return tuple(weight if weight <= rest else as_float32(rest) for weight in weights)
