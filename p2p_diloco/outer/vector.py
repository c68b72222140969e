"""Flat float32 vectors on the host, as used in this package.

Long vectors are processed in blocks that fit into a core's cache: several passes over a block cost less than one pass
over the whole vector. The arithmetic is elementwise, so blocking does not change the result.

Legend: N = elements of one span or fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.kernels.bounds import SMALLEST
from p2p_diloco.kernels.choice import frozen, vector_kernels

Vector: TypeAlias = npt.NDArray[np.float32]
"""One-dimensional float32 array, shape (N,)."""

FEWEST_FOR_LOOPS = 64
BLOCK_ELEMENTS = 16_384
"""64 KiB per operand: four of them fit into the second-level cache of any machine of the last ten years."""


def loops_for(first_N: Vector, *others: Vector) -> ModuleType | None:
    """Return the compiled loops for these vectors; None if there are none, or too few elements.

    Loops check nothing, so for vectors of different lengths or types None is returned, and NumPy raises the error.
    """
    length = len(first_N)
    if length < FEWEST_FOR_LOOPS or not all(is_vector(one) and len(one) == length for one in (first_N, *others)):
        return None
    return vector_kernels()


def iterate_blocks(elements: int) -> Iterator[slice]:
    """Yield slices that cover `range(elements)` in order, each element once."""
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, elements))


def is_vector(candidate: npt.NDArray[np.generic]) -> bool:
    """Return whether `candidate` is one-dimensional float32 in this machine's byte order."""
    return candidate.ndim == 1 and candidate.dtype == np.dtype(np.float32)


def read_only(vector_N: Vector) -> Vector:
    """Return a read-only view of `vector_N`; the owner of the memory must not write to it either."""
    return frozen(vector_N)


def zero_small(vector_N: Vector) -> None:
    """Set values to zero, in place, that are too small for the agreed state; see `kernels/bounds.py`."""
    is_kept_N = np.abs(vector_N) >= SMALLEST
    if not is_kept_N.all():
        vector_N *= is_kept_N  # faster than masked assignment; NaN stays NaN
        vector_N += 0.0  # no negative zeros


def count_non_finite(vector_N: Vector) -> int:
    """Count the NaNs and infinities in `vector_N`."""
    loops = loops_for(vector_N)
    if loops is not None and loops.is_finite(frozen(vector_N)):
        return 0
    finite = sum(int(np.count_nonzero(np.isfinite(vector_N[block]))) for block in iterate_blocks(len(vector_N)))
    return len(vector_N) - finite


def euclidean_norm(vector_N: Vector) -> float:
    """Return the Euclidean norm; NaN or infinity if `vector_N` holds one.

    Squares of float32 are exact in float64. Their sum may differ by an ulp between NumPy builds and the compiled loop.
    That is harmless: a peer sends the norm of its own vector as a value, and nobody recomputes it.
    """
    loops = loops_for(vector_N)
    if loops is not None:
        return math.sqrt(loops.sum_of_squares(frozen(vector_N)))
    block_sums = []
    for block in iterate_blocks(len(vector_N)):
        wide = vector_N[block].astype(np.float64)
        block_sums.append(float(np.sum(wide * wide)))
    return math.sqrt(math.fsum(block_sums))
