"""Exact sums of squares, so that all machines compute the same norm.

A float is an integer times a power of two. Integers are summed exactly per exponent, the few sums are combined into one
Python integer, and that is rounded to float64 once: the result of `math.fsum`, at array speed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.interface import Vector
from p2p_diloco.kernels.operations import bin_squares, iterate_blocks, split_float

_FLOAT32_UNIT_EXPONENT = -149
_BFLOAT16_UNIT_EXPONENT = -133
_FLOAT32_FRACTION_BITS = 23
# A float64 bin holds integers exactly up to 2^53, more than 2^14 addends of at most 2^36 each.
_CHUNK_ELEMENTS = 1 << 14
_LOW_BITS = 24
_BFLOAT16_EXPONENTS = 256
# Bins of int64 hold the sums of more elements.
_BINNED_ELEMENTS = 1 << 26
_NO_WEIGHTS = np.empty(0, dtype=np.int64)


def squared_norm_of_float32(vector_N: Vector) -> float:
    """Return the sum of the squares of finite float32 values, rounded once."""
    total = 0
    for start in range(0, vector_N.size, _CHUNK_ELEMENTS):
        bits_N = vector_N[start : start + _CHUNK_ELEMENTS].view(np.uint32)
        shift_N, integer_N = split_float(bits_N & np.uint32(0x7FFFFFFF), _FLOAT32_FRACTION_BITS)
        square_N = integer_N * integer_N
        total += _sum_of_shifted(shift_N, square_N & ((1 << _LOW_BITS) - 1))
        total += _sum_of_shifted(shift_N, square_N >> _LOW_BITS) << _LOW_BITS
    return math.ldexp(float(total), 2 * _FLOAT32_UNIT_EXPONENT)


def squared_norm_of_bfloat16(bits_N: npt.NDArray[np.uint16], weights_N: npt.NDArray[np.int64] | None = None) -> float:
    """Return the sum of weight · square of finite bfloat16 values, rounded once.

    Args:
        bits_N: bits of the values.
        weights_N: integers from 0 to 2^20; None means 1 for all.
    """
    total, all_N = 0, _NO_WEIGHTS if weights_N is None else weights_N
    for chunk in iterate_blocks(bits_N.size, _BINNED_ELEMENTS):
        bins_E = np.zeros(_BFLOAT16_EXPONENTS, dtype=np.int64)
        bin_squares(bits_N[chunk], all_N[chunk], bins_E)
        total += _sum_of_bins(bins_E)
    return math.ldexp(float(total), 2 * _BFLOAT16_UNIT_EXPONENT)


def _sum_of_shifted(shift_N: npt.NDArray[np.int64], integer_N: npt.NDArray[np.int64]) -> int:
    """Return the exact sum of `integer · 4^shift`."""
    return _sum_of_bins(np.bincount(shift_N, weights=integer_N))


def _sum_of_bins(bins_E: npt.NDArray[Any]) -> int:
    return sum(int(bins_E[shift]) << (2 * shift) for shift in np.flatnonzero(bins_E).tolist())
