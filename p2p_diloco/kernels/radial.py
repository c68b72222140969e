"""Radial means (`outer/radial.py`) of single blocks and of whole float vectors, bitwise equal to the NumPy code.

Multiply and add round separately: numba fuses them only with `fastmath`, which must not be set here.

Legend: N = 64 B elements, B blocks, K = 64 elements of a block, P vectors.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from p2p_diloco.kernels.choice import frozen

_BLOCK, _HALF = 64, 32

_compiled = njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)
_inlined = njit(inline="always", error_model="numpy", boundscheck=False)


@_inlined
def sum_of_block(wide_K):  # type: ignore[no-untyped-def]
    """Add halves to each other until one number is left, as `outer/radial.py` does; overwrites the input."""
    half = _HALF
    while half:
        for k in range(half):
            wide_K[k] = wide_K[k] + wide_K[k + half]
        half >>= 1
    return wide_K[0]


@_inlined
def add_direction(values_K, factor, is_first, direction_K):  # type: ignore[no-untyped-def]
    if is_first:
        for k in range(_BLOCK):
            direction_K[k] = np.float64(values_K[k]) * factor
    else:
        for k in range(_BLOCK):
            direction_K[k] = direction_K[k] + np.float64(values_K[k]) * factor


@_inlined
def mend_length(direction_K, radius, least, square_K, mean_K):  # type: ignore[no-untyped-def]
    """Write the radial mean of a block: its direction, with the length defined in `outer/radial.py`."""
    for k in range(_BLOCK):
        square_K[k] = direction_K[k] * direction_K[k]
    square = max(sum_of_block(square_K), least)
    stretch = radius / math.sqrt(square) if square > 0.0 else 0.0
    for k in range(_BLOCK):
        mean_K[k] = np.float32(direction_K[k] * stretch)


@_inlined
def _radial_block(vectors_PN, shares_P, start, wide_K, direction_K, mean_K):  # type: ignore[no-untyped-def]
    radius, least_square = 0.0, 0.0
    for p in range(shares_P.size):
        vector_K, share = vectors_PN[p, start : start + _BLOCK], np.float64(shares_P[p])
        for k in range(_BLOCK):
            wide_K[k] = np.float64(vector_K[k]) * np.float64(vector_K[k])
        length = math.sqrt(sum_of_block(wide_K))
        radius += share * length
        least_square += share * share if length > 0.0 else 0.0
        add_direction(vector_K, share / length if length > 0.0 else 0.0, p == 0, direction_K)
    mend_length(direction_K, radius, least_square, wide_K, mean_K)


@_compiled
def radial_mean(vectors_PN, shares_P, is_radial_B, mean_N):  # type: ignore[no-untyped-def]
    wide_K, direction_K = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.float64)
    for b in range(is_radial_B.size):
        start = b * _BLOCK
        mean_K = mean_N[start : start + _BLOCK]
        if is_radial_B[b]:
            _radial_block(vectors_PN, shares_P, start, wide_K, direction_K, mean_K)
            continue
        for p in range(shares_P.size):
            vector_K, share = vectors_PN[p, start : start + _BLOCK], shares_P[p]
            if p == 0:
                for k in range(_BLOCK):
                    mean_K[k] = vector_K[k] * share
            else:
                for k in range(_BLOCK):
                    mean_K[k] = mean_K[k] + vector_K[k] * share


def try_out() -> None:
    """Call the loop once, as `outer/radial.py` does."""
    two_PN, is_radial_B = frozen(np.ones((2, 2 * _BLOCK), np.float32)), frozen(np.array([True, False]))
    radial_mean(two_PN, frozen(np.ones(2, np.float32)), is_radial_B, np.empty(2 * _BLOCK, np.float32))
