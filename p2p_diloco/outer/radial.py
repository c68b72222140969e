"""The radial mean: of each block of a span, directions and lengths are averaged apart.

Contributions of many islands are nearly orthogonal, so that their mean is shorter than any of them, the more so the
more there are: by sqrt(n) for n of them. A radial mean has the direction of the mean direction and the mean of the
lengths. One outer rate then suits few islands and many, and who sends long vectors turns a mean no further than
others. Where contributions agree less than orthogonal ones would, the length is not restored beyond what those lose:
opposite ones cancel, as in a plain mean, and no noise is blown up.

A block is what the codecs give a scale to. Which blocks are radial follows from the model (`trainer/run_plan.py`):
rows of an embedding are rare, and their means are short because most islands have nothing to say.

Source: Decoupled DiLoCo, arXiv 2604.21428, radial-directional averaging, there tensor by tensor; why by blocks, and the
bound: docs/decisions/0022.

Legend: N = elements of one span, P = vectors, B = blocks of a span, K = 64 elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.errors import RoundError
from p2p_diloco.outer.mean import check_mean, shares_of, weighted_mean
from p2p_diloco.outer.vector import Vector

RADIAL_BLOCK = 64
_CHUNK_BLOCKS = 512
"""Of which float64 copies stay in a core's cache."""

RadialBlocks: TypeAlias = npt.NDArray[np.bool_]
"""Which blocks of a span have a radial mean, shape (B,); the last block may be short."""

_Wide: TypeAlias = npt.NDArray[np.float64]


def num_radial_blocks(elements: int) -> int:
    """Return B of a span of so many elements."""
    return -(-elements // RADIAL_BLOCK)


def mark_radial(start: int, stop: int, plain: Sequence[tuple[int, int]]) -> RadialBlocks:
    """Return which blocks of a span are radial: those that hold no element of a plain range.

    Args:
        start, stop: where the span lies in its fragment.
        plain: (start, stop) in the fragment, whose elements have a plain mean.
    """
    is_radial_B = np.ones(num_radial_blocks(stop - start), dtype=np.bool_)
    for first, last in plain:
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            is_radial_B[(begin - start) // RADIAL_BLOCK : num_radial_blocks(end - start)] = False
    return is_radial_B


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float], is_radial_B: RadialBlocks) -> Vector:
    """Return the mean, radial in the blocks that are marked and plain in all others.

    In float64, vector by vector in the order given; sums over a block are taken in one fixed order (`sums_of_blocks`),
    so that whoever holds the same vectors and weights gets the same bits.

    Args:
        vectors: decoded contributions in roster order; float32, all of shape (N,). Not changed.
        weights: one per vector, finite and not negative.
        is_radial_B: from `mark_radial`.
    Returns:
        The mean, freshly allocated. No block is longer than the longest of that block.
    Raises:
        RoundError: as `weighted_mean`; or marks of another number of blocks.
        NonFiniteUpdate: the mean holds a NaN or an infinity.
    """
    mean_N = weighted_mean(vectors, weights)
    if len(is_radial_B) != num_radial_blocks(len(mean_N)):
        raise RoundError(f"{len(is_radial_B)} blocks are marked; a span of {len(mean_N)} elements has others")
    mean_BK, shares = _in_blocks(mean_N), shares_of(weights, len(vectors))
    vectors_BK = [_in_blocks(vector_N) for vector_N in vectors]
    marked_B = np.flatnonzero(is_radial_B)
    for start in range(0, len(marked_B), _CHUNK_BLOCKS):
        here_B = marked_B[start : start + _CHUNK_BLOCKS]
        mean_BK[here_B] = _radial([vector_BK[here_B] for vector_BK in vectors_BK], shares)
    radial_N = mean_BK.reshape(-1)[: len(mean_N)]
    check_mean(radial_N, len(vectors))
    return radial_N


def _in_blocks(vector_N: Vector) -> Vector:
    """Return (B, K) of a vector, in its own memory where its blocks are whole, else in fresh one, with zeros behind."""
    missing = -len(vector_N) % RADIAL_BLOCK
    whole_N = np.concatenate((vector_N, np.zeros(missing, np.float32))) if missing else vector_N
    return whole_N.reshape(-1, RADIAL_BLOCK)


def _radial(vectors_BK: Sequence[Vector], shares: Sequence[np.float32]) -> Vector:
    direction_BK = np.zeros(vectors_BK[0].shape)
    radius_B, least_B = np.zeros(len(direction_BK)), np.zeros(len(direction_BK))
    for vector_BK, share in zip(vectors_BK, map(float, shares), strict=True):
        wide_BK = vector_BK.astype(np.float64)
        length_B = np.sqrt(sums_of_blocks(wide_BK * wide_BK))
        is_there_B = length_B > 0.0
        factor_B = np.divide(share, length_B, out=np.zeros_like(length_B), where=is_there_B)
        direction_BK += wide_BK * factor_B[:, None]
        radius_B += share * length_B
        least_B += np.where(is_there_B, share * share, 0.0)
    square_B = np.maximum(sums_of_blocks(direction_BK * direction_BK), least_B)
    stretch_B = np.divide(radius_B, np.sqrt(square_B), out=np.zeros_like(radius_B), where=square_B > 0.0)
    with np.errstate(over="ignore"):
        return (direction_BK * stretch_B[:, None]).astype(np.float32)


def sums_of_blocks(values_BK: _Wide) -> _Wide:
    """Return the sum of each block: halves are added to each other until one number is left.

    An order that NumPy and a compiled loop can both keep to, whatever registers they have.
    """
    half = RADIAL_BLOCK // 2
    while half:
        values_BK = values_BK[:, :half] + values_BK[:, half:]
        half //= 2
    return values_BK[:, 0]
