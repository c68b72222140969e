"""Fused operations on a span of 4-bit codes, each in one pass: contribute, average, and follow an entry.

The operations and their order are the same as in the loops of `blocks.py` and `vectors.py`, so the bits are the same.
But φ, m and θ are read from memory only once, and intermediate results are never written there.

Legend: N = 64 B elements, B blocks, K = 64 elements of a block, P contributions.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from p2p_diloco.kernels.bits import bits_of, float_of
from p2p_diloco.kernels.blocks import (
    BLOCK,
    HALF,
    NO_SCALE,
    decode_block4,
    draw_codes,
    find_codes,
    high_code,
    low_code,
    scale_of,
)
from p2p_diloco.kernels.bounds import SMALLEST
from p2p_diloco.kernels.choice import frozen
from p2p_diloco.kernels.radial import add_direction, mend_length

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST = np.uint32(np.float32(SMALLEST).view(np.uint32))
_ZERO = np.float32(0)

_compiled = njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)
_inlined = njit(inline="always", error_model="numpy", boundscheck=False)


@_inlined
def _is_scale(scale_bits, least_bits, most_bits):  # type: ignore[no-untyped-def]
    """Return whether the scale is valid; negative and non-finite scales are larger as integers."""
    return scale_bits <= most_bits and (scale_bits >= least_bits or scale_bits == 0)


@_inlined
def _pack_block(codes_K, out):  # type: ignore[no-untyped-def]
    """Write a block's codes, two per byte; return the sum of their squares."""
    for k in range(HALF):
        out[k] = (codes_K[2 * k] & np.uint32(15)) | ((codes_K[2 * k + 1] & np.uint32(15)) << np.uint32(4))
    total = np.int32(0)
    for k in range(HALF):
        low, high = low_code(out[k]), high_code(out[k])
        total += low * low + high * high
    return total


@_compiled
def contribute4(anchor_N, local_N, largest, least_bits, most_bits, scale_bits_B, packed, squares_B):  # type: ignore[no-untyped-def]
    """Encode φ − θ, rounded to nearest, with the sum of the squared codes of each block.

    Returns the sum of the squares of φ − θ, in the order of `sum_of_squares`; NaN if a value is not finite.
    """
    delta_K, codes_K = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    lanes_K = np.zeros(BLOCK, np.float64)
    for b in range(scale_bits_B.size):
        anchor_K, local_K = anchor_N[b * BLOCK : b * BLOCK + BLOCK], local_N[b * BLOCK : b * BLOCK + BLOCK]
        for k in range(BLOCK):
            delta_K[k] = anchor_K[k] - local_K[k]
        for k in range(BLOCK):
            wide = np.float64(delta_K[k])
            lanes_K[k] += wide * wide
        scale_bits = scale_of(delta_K, largest, least_bits, most_bits)
        if scale_bits == NO_SCALE:
            return np.nan
        scale_bits_B[b] = scale_bits
        find_codes(delta_K, scale_bits, largest, codes_K)
        squares_B[b] = _pack_block(codes_K, packed[b * HALF : b * HALF + HALF])
    total_of_lanes = 0.0
    for k in range(BLOCK):
        total_of_lanes += lanes_K[k]
    return total_of_lanes


@_compiled
def follow4(entry, own, vectors, rates, limits, next_vectors):  # type: ignore[no-untyped-def]
    """Do an outer step along an entry, and merge θ with `keep`: remove its own contribution, if there is one.

    Args:
        entry, own: (bits of scales, codes) each; `own` is empty if there is nothing to remove from θ.
        vectors: φ, m, θ.
        rates: η, μ.
        limits: the largest code, and the bits of the smallest and largest scale.
        next_vectors: outputs for the next φ, m and θ.
    Returns False for an invalid code or scale, or if φ is not finite; the outputs must not be used then.
    """
    (entry_scales_B, entry_codes), (own_scales_B, own_codes) = entry, own
    (anchor_N, momentum_N, local_N), (rate, momentum), (largest, least_bits, most_bits) = vectors, rates, limits
    next_anchor_N, next_momentum_N, next_local_N = next_vectors
    update_K, own_K = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    lowest, peak, least = np.int32(0), np.uint32(0), np.int32(-largest)
    for b in range(entry_scales_B.size):
        start, stop = b * BLOCK, b * BLOCK + BLOCK
        scale_bits = np.uint32(entry_scales_B[b])
        if not _is_scale(scale_bits, least_bits, most_bits):
            return False
        lowest = min(lowest, decode_block4(scale_bits, entry_codes[b * HALF : b * HALF + HALF], update_K))
        anchor_K, momentum_K, local_K = anchor_N[start:stop], momentum_N[start:stop], local_N[start:stop]
        next_anchor_K, next_momentum_K = next_anchor_N[start:stop], next_momentum_N[start:stop]
        next_local_K = next_local_N[start:stop]
        for k in range(BLOCK):
            moved = momentum_K[k] * momentum + update_K[k]
            moved = moved if bits_of(moved) & _MAGNITUDE >= _SMALLEST else _ZERO
            stepped = anchor_K[k] - (update_K[k] + moved * momentum) * rate
            magnitude = bits_of(stepped) & _MAGNITUDE
            next_momentum_K[k] = moved
            next_anchor_K[k] = stepped if magnitude >= _SMALLEST else _ZERO
            peak = max(peak, magnitude)
        if own_scales_B.size:
            own_bits = np.uint32(own_scales_B[b])
            lowest = min(lowest, decode_block4(own_bits, own_codes[b * HALF : b * HALF + HALF], own_K))
            for k in range(BLOCK):
                next_local_K[k] = local_K[k] + ((next_anchor_K[k] - anchor_K[k]) + own_K[k])
        else:
            for k in range(BLOCK):
                next_local_K[k] = local_K[k] + (next_anchor_K[k] - anchor_K[k])
    return lowest >= least and peak < _INFINITY


@_compiled
def average4(  # type: ignore[no-untyped-def]
    scales_PB, codes_PN, shares_P, is_radial_B, noise_N, limits, scale_bits_B, packed, squares_PB, squares_B
):
    """Encode Σ share · value, rounded to nearest if `noise_N` is empty, with the squared codes of each block.

    Blocks marked in `is_radial_B` use the radial mean (`outer/radial.py`); none if it is empty.

    Returns False for an invalid code or scale, or if a sum is not finite; the outputs must not be used then.
    """
    values_K, mean_K, codes_K = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    direction_K, square_K = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    largest, least_bits, most_bits = limits
    lowest, least = np.int32(0), np.int32(-largest)
    for b in range(scale_bits_B.size):
        is_radial = is_radial_B.size > 0 and is_radial_B[b]
        radius, least_square = 0.0, 0.0
        for p in range(shares_P.size):
            bits, share = np.uint32(scales_PB[p, b]), shares_P[p]
            if not _is_scale(bits, least_bits, most_bits):
                return False
            held, scale, total = codes_PN[p, b * HALF : b * HALF + HALF], float_of(bits << np.uint32(16)), np.int32(0)
            for k in range(HALF):
                low, high = low_code(held[k]), high_code(held[k])
                lowest = min(lowest, low, high)
                total += low * low + high * high
                values_K[2 * k] = np.float32(low) * scale
                values_K[2 * k + 1] = np.float32(high) * scale
            squares_PB[p, b] = total
            if is_radial:
                wide, wide_share = np.float64(scale), np.float64(share)
                length = math.sqrt(wide * wide * np.float64(total))
                radius += wide_share * length
                least_square += wide_share * wide_share if length > 0.0 else 0.0
                add_direction(values_K, wide_share / length if length > 0.0 else 0.0, p == 0, direction_K)
            elif p == 0:
                for k in range(BLOCK):
                    mean_K[k] = values_K[k] * share
            else:
                for k in range(BLOCK):
                    mean_K[k] = mean_K[k] + values_K[k] * share
        if is_radial:
            mend_length(direction_K, radius, least_square, square_K, mean_K)
        scale_bits = scale_of(mean_K, largest, least_bits, most_bits)
        if scale_bits == NO_SCALE:
            return False
        scale_bits_B[b] = scale_bits
        if noise_N.size:
            draw_codes(mean_K, scale_bits, largest, noise_N[b * BLOCK : b * BLOCK + BLOCK], codes_K)
        else:
            find_codes(mean_K, scale_bits, largest, codes_K)
        squares_B[b] = _pack_block(codes_K, packed[b * HALF : b * HALF + HALF])
    return lowest >= least


def try_out() -> None:
    """Call each loop once, as `span/span_work.py` and `span/vector_work.py` do."""
    vector_N, out_N = frozen(np.ones(BLOCK, np.float32)), np.empty(BLOCK, np.float32)
    scale_bits_B, packed = np.empty(1, np.uint16), np.empty(HALF, np.uint8)
    limits = (np.float32(7), np.uint32(0x0080), np.uint32(0x7E00))
    contribute4(vector_N, vector_N, *limits, scale_bits_B, packed, np.empty(1, np.int64))
    sent, rates = (frozen(scale_bits_B), frozen(packed)), (np.float32(0.5), np.float32(0.5))
    follow4(sent, sent, (vector_N,) * 3, rates, limits, (out_N, np.empty_like(out_N), np.empty_like(out_N)))
    two_scales, two_codes, shares_P = np.zeros((2, 1), np.uint16), np.zeros((2, HALF), np.uint8), np.ones(2, np.float32)
    squares_PB, squares_B = np.empty((2, 1), np.int64), np.empty(1, np.int64)
    noise_N, is_radial_B = np.zeros(BLOCK, np.uint16), frozen(np.ones(1, np.bool_))
    into = (scale_bits_B, packed, squares_PB, squares_B)
    average4(two_scales, two_codes, shares_P, is_radial_B, noise_N, limits, *into)
