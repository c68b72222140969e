"""The weighted mean of contributions.

The result is deterministic given contributions, weights and roster, so that a witness can check a reducer.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.kernels.operations import iterate_blocks
from p2p_diloco.outer.vector import Vector, count_non_finite


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return Σ wᵢ vᵢ / Σ wᵢ, summed in the given order (the roster's), with separate multiply and add.

    Weights are normalised in float64 and then rounded to float32, so that their magnitude cannot cause an overflow.

    Args:
        vectors: decoded contributions in roster order; float32, all of shape (N,). Not changed.
        weights: one per vector, finite and not negative.
    Returns:
        The mean, freshly allocated.
    Raises:
        RoundError: counts or lengths differ, a weight is negative or not finite, or all weights are zero.
        NonFiniteUpdate: the mean holds a NaN or an infinity.
    """
    lengths = {len(vector_N) for vector_N in vectors}
    if len(lengths) > 1:
        raise RoundError(f"cannot average contributions of {sorted(lengths)} elements; expected one length")
    shares = shares_of(weights, len(vectors))
    mean_N = np.empty_like(vectors[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for block in iterate_blocks(len(mean_N)):
            np.multiply(vectors[0][block], shares[0], out=mean_N[block])
            for vector_N, share in zip(vectors[1:], shares[1:], strict=True):
                np.add(mean_N[block], np.multiply(vector_N[block], share), out=mean_N[block])
    check_mean(mean_N, len(vectors))
    return mean_N


def check_mean(mean_N: Vector, num_vectors: int) -> None:
    """Check a computed mean.

    Raises:
        NonFiniteUpdate: it holds a NaN or an infinity.
    """
    if count_non_finite(mean_N):
        raise NonFiniteUpdate(
            f"the mean of {num_vectors} contributions holds {count_non_finite(mean_N)} non-finite numbers among "
            f"{len(mean_N)}; the span is skipped this round"
        )


def shares_of(weights: Sequence[float], num_vectors: int) -> list[np.float32]:
    """Return the normalised weight of each vector of a mean.

    Raises:
        RoundError: there are no vectors, the counts differ, a weight is negative or not finite, or all are zero.
    """
    if not num_vectors or num_vectors != len(weights):
        raise RoundError(f"cannot average {num_vectors} contributions with {len(weights)} weights")
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise RoundError(f"weights {list(weights)} are not all finite and at least 0; the span is skipped this round")
    largest = max(weights)
    if largest == 0.0:
        raise RoundError(f"all {len(weights)} contributions have weight 0; the span is skipped this round")
    # Scaling by a power of two is exact, and prevents overflow of the sum.
    scaled = [math.ldexp(weight, -math.frexp(largest)[1]) for weight in weights]
    total = math.fsum(scaled)
    return [np.float32(weight / total) for weight in scaled]
