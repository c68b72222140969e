"""Means of contributions: plain, or radial, with directions and lengths averaged separately, block by block.

Both are deterministic given contributions, weights and roster, so that a witness can check a reducer.

Contributions of many islands are nearly orthogonal, so their mean is shorter than each of them: by sqrt(n) for n
islands. A radial mean has the direction of the mean direction and the mean of the lengths, so that the same outer rate
suits few islands and many. Only the weights determine the influence on the direction: long vectors do not turn it
further than short ones. If contributions agree less than orthogonal ones would, the length is restored only as much as
for orthogonal ones: opposite contributions cancel, as in a plain mean, and noise is not amplified.

Among strangers a block of a vector counts for at most so many times the median length of that block, so that nobody
puts all of its length in one place.

A block is the unit that has a codec scale. The model determines which blocks are radial (`peer/run_plan.py`): rows of
an embedding are rare, and their means are short because most islands have no update for them.

Source: Decoupled DiLoCo, arXiv 2604.21428, radial-directional averaging, there tensor by tensor. For the reason for
blocks, and the bound, see docs/decisions/learning.md.

Legend: N = elements of one span, P = vectors, B = blocks of a span, K = 64 elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.vectors import BLOCK, Vector, Wide, count_non_finite, iterate_blocks, num_blocks, with_loop
from p2p_diloco.errors import NonFiniteUpdate, RoundError

Part: TypeAlias = Callable[[slice], Vector]
"""Returns the elements of one vector in a slice."""
RadialBlocks: TypeAlias = npt.NDArray[np.bool_]
"""Which blocks of a span use the radial mean, shape (B,); the last block may be short."""

NO_LIMITS: Wide = np.empty(0, np.float64)
_CHUNK_BLOCKS = 512
"""Blocks processed at a time, of which all vectors are copied."""


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
    """Return each vector's share of a mean: weights are normalised in float64, so that large ones cannot overflow.

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


def mark_radial(start: int, stop: int, plain: Sequence[tuple[int, int]]) -> RadialBlocks:
    """Return which blocks of a span are radial: those without an element of a plain range.

    Args:
        start, stop: position of the span in its fragment.
        plain: (start, stop) in the fragment of elements with a plain mean.
    """
    is_radial_B = np.ones(num_blocks(stop - start), dtype=np.bool_)
    for first, last in plain:
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            is_radial_B[(begin - start) // BLOCK : num_blocks(end - start)] = False
    return is_radial_B


def radial_mean_of(
    parts: Sequence[Part],
    elements: int,
    weights: Sequence[float],
    is_radial_B: RadialBlocks,
    *,
    longest_medians: float = 0.0,
) -> Vector:
    """Return the mean of vectors: radial in the marked blocks and plain in the others.

    Computed in float64, vector by vector in the given order; sums over a block use a fixed order (`sums_of_blocks`), so
    that the result is deterministic.

    Args:
        parts: for each vector, in roster order, a function that returns the elements of a slice that begins at a block.
        weights: one per vector, finite and not negative.
        is_radial_B: from `mark_radial`.
        longest_medians: blocks are cut at this multiple of their median length, as `longest_blocks` defines it; 0: not.
    Returns:
        The mean, freshly allocated. No marked block is longer than the mean of its lengths.
    Raises:
        RoundError: as `shares_of`, or the number of marks is wrong.
        NonFiniteUpdate: the mean holds a NaN or an infinity.
    """
    if len(is_radial_B) != num_blocks(elements):
        raise RoundError(f"got marks for {len(is_radial_B)} blocks; a span of {elements} elements has another number")
    shares_P = np.array(shares_of(weights, len(parts)), np.float32)
    chunks, longest_B = list(iterate_blocks(len(is_radial_B), _CHUNK_BLOCKS)), NO_LIMITS
    mean_N = np.empty(len(is_radial_B) * BLOCK, np.float32)
    if longest_medians:
        lengths = [lengths_of_blocks(_read(parts, elements, blocks)) for blocks in chunks]
        longest_B = longest_blocks(np.concatenate(lengths, axis=1), is_radial_B, longest_medians)
    for blocks in chunks:
        whole_N, vectors_PN = mean_N[blocks.start * BLOCK : blocks.stop * BLOCK], _read(parts, elements, blocks)
        radial_mean(vectors_PN, shares_P, is_radial_B[blocks], longest_B[blocks], whole_N)
    check_mean(mean_N[:elements], len(parts))
    return mean_N[:elements]


def _read(parts: Sequence[Part], elements: int, blocks: slice) -> Vector:
    """Return some blocks of all vectors, shape (P, 64 B), with zeros at the end of a short one."""
    start, stop = blocks.start * BLOCK, blocks.stop * BLOCK
    vectors_PN = np.zeros((len(parts), stop - start), np.float32)
    for vector_N, part in zip(vectors_PN, parts, strict=True):
        vector_N[: min(stop, elements) - start] = part(slice(start, min(stop, elements)))
    return vectors_PN


def lengths_of_blocks(vectors_PN: Vector) -> Wide:
    """Return the lengths of the blocks of vectors, shape (P, B)."""
    wide_PBK = [vector_N.astype(np.float64).reshape(-1, BLOCK) for vector_N in vectors_PN]
    return np.sqrt(np.stack([sums_of_blocks(wide_BK * wide_BK) for wide_BK in wide_PBK]))


def longest_blocks(lengths_PB: Wide, is_radial_B: RadialBlocks, medians: float) -> Wide:
    """Return the length at which each block of strangers' vectors is cut, shape (B,); infinity: it is not.

    A block counts for at most so many times its median length, the lower one of those that are not zero, if there are
    three or more. In a row of an embedding all vectors but a few may hold nothing but what rounding has left, so where
    means are plain each counts at least for the length that is typical of such blocks: the lower median over vectors of
    √(Σ length⁴ / Σ length²). That is the limit, too, where fewer than three are not zero.
    """
    longest_B = medians * lower_medians(lengths_PB)
    squares_PB = np.square(lengths_PB[:, ~is_radial_B])
    with np.errstate(invalid="ignore"):  # a scale that is not finite: the mean is refused later
        # A running sum has one order on any hardware.
        sums_P, fourths_P = (np.cumsum(each_PB, axis=1)[:, -1:].sum(axis=1) for each_PB in (squares_PB, squares_PB**2))
        typical_P = np.sqrt(np.divide(fourths_P, sums_P, out=np.zeros_like(sums_P), where=sums_P > 0.0))
    (least,) = lower_medians(typical_P[:, None])
    is_known_B = longest_B < np.inf
    longest_B[~is_radial_B] = np.where(is_known_B, np.maximum(longest_B, least), least)[~is_radial_B]
    return longest_B


def lower_medians(lengths_PB: Wide) -> Wide:
    """Return the lower median of those that are not zero; infinity for fewer than three."""
    count_B = np.count_nonzero(lengths_PB > 0.0, axis=0)
    middle_B = len(lengths_PB) - count_B + (count_B - 1) // 2  # zeros are sorted to the front
    sorted_PB = np.sort(lengths_PB, axis=0)
    medians_B = np.take_along_axis(sorted_PB, middle_B.clip(max=len(lengths_PB) - 1)[None], axis=0)[0]
    return np.where(count_B >= 3, medians_B, np.inf)


@with_loop()
def radial_mean(
    vectors_PN: Vector, shares_P: Vector, is_radial_B: RadialBlocks, longest_B: Wide, mean_N: Vector
) -> None:
    """Write the mean: radial in marked blocks; plain, rounded after each step, in the others.

    Args:
        longest_B: lengths at which blocks are cut; none are if it is empty.
    """
    vectors_PBK, mean_BK = vectors_PN.reshape(len(vectors_PN), -1, BLOCK), mean_N.reshape(-1, BLOCK)
    lengths_PB = lengths_of_blocks(vectors_PN)
    longest_B = longest_B if len(longest_B) else np.full(len(mean_BK), np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        for place, (vector_BK, length_B, share) in enumerate(zip(vectors_PBK, lengths_PB, shares_P, strict=True)):
            is_long_B = length_B > longest_B
            factor_B = np.divide(longest_B, length_B, out=np.ones_like(length_B), where=is_long_B)
            addend_BK = vector_BK * factor_B.astype(np.float32)[:, None] * share
            mean_BK[:] = addend_BK if place == 0 else mean_BK + addend_BK
        marked_PB = np.minimum(lengths_PB, longest_B)[:, is_radial_B]
        mean_BK[is_radial_B] = _radial(vectors_PBK[:, is_radial_B], lengths_PB[:, is_radial_B], marked_PB, shares_P)


def _radial(vectors_PBK: Vector, lengths_PB: Wide, counted_PB: Wide, shares_P: Vector) -> Vector:
    direction_BK = np.full(vectors_PBK.shape[1:], -0.0)  # -0.0 + x is x for every x, including -0.0
    radius_B, least_B = np.zeros(len(direction_BK)), np.zeros(len(direction_BK))
    for vector_BK, length_B, counted_B, share in zip(
        vectors_PBK, lengths_PB, counted_PB, map(float, shares_P), strict=True
    ):
        is_there_B = length_B > 0.0
        factor_B = np.divide(share, length_B, out=np.zeros_like(length_B), where=is_there_B)
        direction_BK += vector_BK.astype(np.float64) * factor_B[:, None]
        radius_B += share * counted_B
        least_B += np.where(is_there_B, share * share, 0.0)
    square_B = np.maximum(sums_of_blocks(direction_BK * direction_BK), least_B)
    stretch_B = np.divide(radius_B, np.sqrt(square_B), out=np.zeros_like(radius_B), where=square_B > 0.0)
    return (direction_BK * stretch_B[:, None]).astype(np.float32)


def sums_of_blocks(values_BK: Wide) -> Wide:
    """Return the sum of each block by adding halves to each other until one number is left.

    NumPy and a compiled loop can both use this order on any hardware.
    """
    half = BLOCK // 2
    while half:
        values_BK = values_BK[:, :half] + values_BK[:, half:]
        half //= 2
    return values_BK[:, 0]
