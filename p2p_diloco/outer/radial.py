"""The radial mean: average directions and lengths separately, block by block.

Contributions of many islands are nearly orthogonal, so their mean is shorter than each of them: by sqrt(n) for n
islands. A radial mean has the direction of the mean direction and the mean of the lengths, so that the same outer rate
suits few islands and many. Only the weights determine the influence on the direction: long vectors do not turn it
further than short ones. If contributions agree less than orthogonal ones would, the length is restored only as much as
for orthogonal ones: opposite contributions cancel, as in a plain mean, and noise is not amplified.

A block is the unit that has a codec scale. The model determines which blocks are radial (`peer/run_plan.py`): rows of
an embedding are rare, and their means are short because most islands have no update for them.

Source: Decoupled DiLoCo, arXiv 2604.21428, radial-directional averaging, there tensor by tensor. For the reason for
blocks, and the bound, see docs/decisions/0022.

Legend: N = elements of one span, P = vectors, B = blocks of a span, K = 64 elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.errors import RoundError
from p2p_diloco.kernels import operations as kernels
from p2p_diloco.outer.mean import check_mean, shares_of
from p2p_diloco.outer.vector import Vector

RADIAL_BLOCK = kernels.BLOCK
_CHUNK_BLOCKS = 512
"""Blocks processed at a time, of which all vectors are copied."""

Part: TypeAlias = Callable[[slice], Vector]
"""Returns the elements of one vector in a slice."""

RadialBlocks: TypeAlias = npt.NDArray[np.bool_]
"""Which blocks of a span use the radial mean, shape (B,); the last block may be short."""


def num_radial_blocks(elements: int) -> int:
    """Return the number of blocks B of a span."""
    return -(-elements // RADIAL_BLOCK)


def mark_radial(start: int, stop: int, plain: Sequence[tuple[int, int]]) -> RadialBlocks:
    """Return which blocks of a span are radial: those without an element of a plain range.

    Args:
        start, stop: position of the span in its fragment.
        plain: (start, stop) in the fragment of elements with a plain mean.
    """
    is_radial_B = np.ones(num_radial_blocks(stop - start), dtype=np.bool_)
    for first, last in plain:
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            is_radial_B[(begin - start) // RADIAL_BLOCK : num_radial_blocks(end - start)] = False
    return is_radial_B


def radial_mean_of(parts: Sequence[Part], elements: int, weights: Sequence[float], is_radial_B: RadialBlocks) -> Vector:
    """Return the mean of vectors: radial in the marked blocks and plain in the others.

    Computed in float64, vector by vector in the given order; sums over a block use a fixed order (`sums_of_blocks`), so
    that the result is deterministic.

    Args:
        parts: for each vector, in roster order, a function that returns the elements of a slice that begins at a block.
        elements: number of elements of each vector.
        weights: one per vector, finite and not negative.
        is_radial_B: from `mark_radial`.
    Returns:
        The mean, freshly allocated. No marked block is longer than the mean of its lengths.
    Raises:
        RoundError: as `weighted_mean`, or the number of marks is wrong.
        NonFiniteUpdate: the mean holds a NaN or an infinity.
    """
    if len(is_radial_B) != num_radial_blocks(elements):
        raise RoundError(f"got marks for {len(is_radial_B)} blocks; a span of {elements} elements has another number")
    shares_P = np.array(shares_of(weights, len(parts)), np.float32)
    mean_N = np.empty(len(is_radial_B) * RADIAL_BLOCK, np.float32)
    for blocks in kernels.iterate_blocks(len(is_radial_B), _CHUNK_BLOCKS):
        whole_N = mean_N[blocks.start * RADIAL_BLOCK : blocks.stop * RADIAL_BLOCK]
        here = slice(blocks.start * RADIAL_BLOCK, min(blocks.stop * RADIAL_BLOCK, elements))
        vectors_PN = np.zeros((len(parts), len(whole_N)), np.float32)
        for vector_N, part in zip(vectors_PN, parts, strict=True):
            vector_N[: here.stop - here.start] = part(here)
        kernels.radial_mean(vectors_PN, shares_P, is_radial_B[blocks], whole_N)
    check_mean(mean_N[:elements], len(parts))
    return mean_N[:elements]
