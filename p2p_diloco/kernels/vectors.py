"""Steps of the outer update over whole vectors, each in one pass, bitwise equal to the NumPy code in `operations.py`.

Multiply and add round separately: numba fuses them only with `fastmath`, which must not be set here.

Legend: N elements of a span.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2p_diloco.kernels.bits import bits_of
from p2p_diloco.kernels.bounds import SMALLEST
from p2p_diloco.kernels.choice import frozen

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST = np.uint32(np.float32(SMALLEST).view(np.uint32))
_ZERO = np.float32(0)
_LANES = 64

_compiled = njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)


@_compiled
def outer_step(anchor_N, momentum_N, update_N, rates, next_anchor_N, next_momentum_N):  # type: ignore[no-untyped-def]
    peak, (rate, momentum) = np.uint32(0), rates
    for n in range(update_N.size):
        moved = momentum_N[n] * momentum + update_N[n]
        moved = moved if bits_of(moved) & _MAGNITUDE >= _SMALLEST else _ZERO
        stepped = anchor_N[n] - (update_N[n] + moved * momentum) * rate
        magnitude = bits_of(stepped) & _MAGNITUDE
        next_momentum_N[n] = moved
        next_anchor_N[n] = stepped if magnitude >= _SMALLEST else _ZERO
        peak = max(peak, magnitude)
    return peak < _INFINITY


@_compiled
def follow(local_N, before_N, after_N, leaving_N, merged_N):  # type: ignore[no-untyped-def]
    for n in range(local_N.size):
        merged_N[n] = local_N[n] + ((after_N[n] - before_N[n]) + leaving_N[n])


@_compiled
def sum_of_squares(vector_N):  # type: ignore[no-untyped-def]
    """Return the sum of the squares in float64, added lane by lane in a fixed order."""
    lanes = np.zeros(_LANES, np.float64)
    whole = vector_N.size // _LANES * _LANES
    for first in range(0, whole, _LANES):
        part = vector_N[first : first + _LANES]
        for lane in range(_LANES):
            wide = np.float64(part[lane])
            lanes[lane] += wide * wide
    total = 0.0
    for lane in range(_LANES):
        total += lanes[lane]
    for n in range(whole, vector_N.size):
        wide = np.float64(vector_N[n])
        total += wide * wide
    return total


@_compiled
def is_finite(vector_N):  # type: ignore[no-untyped-def]
    peak = np.uint32(0)
    for n in range(vector_N.size):
        peak = max(peak, bits_of(vector_N[n]) & _MAGNITUDE)
    return peak < _INFINITY


@_compiled
def is_within(vector_N, most):  # type: ignore[no-untyped-def]
    peak, least = np.uint32(0), _MAGNITUDE
    for n in range(vector_N.size):
        magnitude = bits_of(vector_N[n]) & _MAGNITUDE
        peak = max(peak, magnitude)
        least = min(least, magnitude if magnitude > 0 else _MAGNITUDE)
    return peak <= most and least >= _SMALLEST


def try_out() -> None:
    """Call each loop once, as `operations.py` does."""
    vector_N, share = frozen(np.ones(_LANES, np.float32)), np.float32(0.5)
    one_N, other_N = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    outer_step(vector_N, vector_N, vector_N, (share, share), one_N, other_N)
    follow(vector_N, vector_N, vector_N, vector_N, one_N)
    sum_of_squares(vector_N)
    is_finite(vector_N)
    is_within(vector_N, _INFINITY)
