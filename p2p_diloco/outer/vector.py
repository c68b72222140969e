"""Flat float32 vectors on the host, as used in this package.

Legend: N = elements of one span or fragment.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.kernels.choice import frozen
from p2p_diloco.kernels.operations import is_finite, sum_of_squares

Vector: TypeAlias = npt.NDArray[np.float32]
"""One-dimensional float32 array, shape (N,)."""


def read_only(vector_N: Vector) -> Vector:
    """Return a read-only view of `vector_N`; the owner of the memory must not write to it either."""
    return frozen(vector_N)


def count_non_finite(vector_N: Vector) -> int:
    """Count the NaNs and infinities in `vector_N`."""
    return 0 if is_finite(vector_N) else len(vector_N) - int(np.count_nonzero(np.isfinite(vector_N)))


def euclidean_norm(vector_N: Vector) -> float:
    """Return the Euclidean norm; NaN or infinity if `vector_N` holds one.

    Squares of float32 are exact in float64. Their sum may differ by an ulp between NumPy builds and the compiled loop.
    That is harmless: a peer sends the norm of its own vector as a value, and nobody recomputes it.
    """
    return math.sqrt(sum_of_squares(vector_N))
