"""Gaps between rows, with intervals over seeds and held-out text, corrected for the number of comparisons.

Legend: S = seeds, B = pieces of held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.setting import Outcome

CONFIDENCE = 0.95
_MOST_FREEDOM = 1000
_INTERVALS = 400
"""Even number of intervals of Simpson's rule; the error is far below the digits of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Relative gap of one row's loss to another row's; positive if the first is higher.

    Attributes:
        mean: mean over paired seeds.
        half_width: half of the confidence interval; None with one seed.
    """

    mean: float
    half_width: float | None


def paired_gap(ours: Sequence[Outcome], theirs: Sequence[Outcome], comparisons: int = 1) -> Gap:
    """Return the relative gap of `ours` to `theirs`, seed by seed.

    If all outcomes have the losses of the same pieces of held-out text, the interval is over seeds and pieces, else
    over seeds.

    Args:
        comparisons: number of gaps whose intervals hold together with 95 % (Bonferroni).
    """
    blocks = {len(outcome.blocks) for outcome in (*ours, *theirs)}
    if blocks == {0} or len(blocks) > 1:
        gaps_SB = np.array([[a.loss / b.loss - 1.0] for a, b in zip(ours, theirs, strict=True)])
    else:
        # Relative to the whole loss: the gap is then the mean of the differences, piece by piece.
        gaps_SB = np.array(
            [(np.array(a.blocks) - np.array(b.blocks)) / b.loss for a, b in zip(ours, theirs, strict=True)]
        )
    return Gap(mean=float(gaps_SB.mean()), half_width=_half_width(gaps_SB, comparisons))


def _half_width(gaps_SB: NDArray[np.float64], comparisons: int) -> float | None:
    """Return half of the interval of the mean, from the variance of its mean over seeds plus that over pieces.

    The variance that belongs to neither is counted twice, so that the interval is rather too wide. The degrees of
    freedom are Satterthwaite's.
    """
    num_seeds, num_blocks = gaps_SB.shape
    if num_seeds < 2:
        return None
    by_seed = float(gaps_SB.mean(axis=1).var(ddof=1)) / num_seeds
    by_block = float(gaps_SB.mean(axis=0).var(ddof=1)) / num_blocks if num_blocks > 1 else 0.0
    variance = by_seed + by_block
    if variance == 0.0:
        return 0.0
    spread = by_seed**2 / (num_seeds - 1) + (by_block**2 / (num_blocks - 1) if num_blocks > 1 else 0.0)
    freedom = min(variance**2 / spread, _MOST_FREEDOM)
    return student_t(freedom, (1.0 - CONFIDENCE) / comparisons) * math.sqrt(variance)


def student_t(freedom: float, error: float) -> float:
    """Return t such that a variable of Student's distribution exceeds it, in either direction, with this probability.

    Args:
        freedom: degrees of freedom, at least 1.
        error: probability, more than 0 and less than 1.
    """
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > error:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _beyond(middle, freedom) > error else (low, middle)
    return high


def _beyond(t: float, freedom: float) -> float:
    """Return the probability that a variable of Student's distribution is beyond ±t.

    With x = √f tan a, the density becomes cos(a)^(f − 1), up to a factor, on a bounded range.
    """
    angles = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2.0, _INTERVALS + 1)
    weights = np.ones(_INTERVALS + 1)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    density = np.maximum(np.cos(angles), 0.0) ** (freedom - 1.0)
    integral = float(weights @ density) * float(angles[1] - angles[0]) / 3.0
    factor = math.lgamma((freedom + 1.0) / 2.0) - math.lgamma(freedom / 2.0) - 0.5 * math.log(math.pi)
    return 2.0 * math.exp(factor) * integral
