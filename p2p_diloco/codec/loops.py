"""The compiled loops: the same bits as the NumPy form of each operation, in one pass.

Each loop is compiled for the types that its decorator lists, when this module is imported (`vectors.py` does that).
A loop that finds an invalid value returns False, or NaN, and the caller's NumPy code raises the detailed error; the
outputs must not be used then. Multiply and add round separately: numba fuses them only with `fastmath`, which must not
be set here. Loops over a block have a fixed length, so that the compiler needs no remainder loop and can use wide
registers.

Legend: N = 64 B elements of a span, B blocks, K = 64 elements of a block, P contributions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import boolean, float32, float64, int32, int64, njit, types, uint8, uint16, uint32
from numba.extending import intrinsic

from p2p_diloco.codec.vectors import BLOCK, SMALLEST

HALF = BLOCK // 2
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST = np.uint32(np.float32(SMALLEST).view(np.uint32))
_TO_INTEGER = np.float32(12582912.0)
_NOISE_STEP = np.float32(2**-16)
_NOISE_START = np.float32(2**-17 - 0.5)
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_SCALE = np.uint32(0xFFFFFFFF)


def _input(element: Any, dimensions: int = 1) -> Any:
    return types.Array(element, dimensions, "C", readonly=True)


def _tuple(*elements: Any) -> Any:
    return types.BaseTuple.from_types(elements)  # type: ignore[no-untyped-call]


_VECTOR, _SCALES, _CODES, _NOISE = _input(float32), _input(uint16), _input(uint8), _input(uint16)
_PARTS, _MARKS = _tuple(_SCALES, _CODES), _input(boolean)
_RATES, _LIMITS = _tuple(float32, float32), _tuple(float32, uint32, uint32)
_VECTOR_OUT, _SCALES_OUT, _CODES_OUT, _SQUARES_OUT = float32[::1], uint16[::1], uint8[::1], int64[::1]


def _compiled(signature: Any) -> Any:
    return njit(signature, cache=True, nogil=True, error_model="numpy", boundscheck=False)


# Inlined by numba, because passing an array to a function would count its references for every block.
_inlined = njit(inline="always", error_model="numpy", boundscheck=False)


def _bitcast(source: Any, target: Any) -> Any:
    def bitcast(context: Any, value: Any) -> Any:
        def generate(backend: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], backend.get_value_type(target))

        return target(source), generate

    return intrinsic(bitcast)


bits_of = _bitcast(float32, uint32)
"""float32 -> uint32."""
float_of = _bitcast(uint32, float32)
"""uint32 -> float32."""


# -- whole vectors


@_compiled(boolean(_VECTOR, _VECTOR, _VECTOR, _RATES, _VECTOR_OUT, _VECTOR_OUT))
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


@_compiled(types.void(_VECTOR, _VECTOR, _VECTOR, _VECTOR, _VECTOR_OUT))
def follow(local_N, before_N, after_N, leaving_N, merged_N):  # type: ignore[no-untyped-def]
    for n in range(local_N.size):
        merged_N[n] = local_N[n] + ((after_N[n] - before_N[n]) + leaving_N[n])


@_compiled(float64(_VECTOR))
def sum_of_squares(vector_N):  # type: ignore[no-untyped-def]
    """Return the sum of the squares in float64, added lane by lane in a fixed order."""
    lanes_K, total = np.zeros(BLOCK, np.float64), 0.0
    whole = vector_N.size // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        part_K = vector_N[first : first + BLOCK]
        for k in range(BLOCK):
            wide = np.float64(part_K[k])
            lanes_K[k] += wide * wide
    for k in range(BLOCK):
        total += lanes_K[k]
    for n in range(whole, vector_N.size):
        wide = np.float64(vector_N[n])
        total += wide * wide
    return total


@_compiled(boolean(_VECTOR))
def is_finite(vector_N):  # type: ignore[no-untyped-def]
    peak = np.uint32(0)
    for n in range(vector_N.size):
        peak = max(peak, bits_of(vector_N[n]) & _MAGNITUDE)
    return peak < _INFINITY


@_compiled(boolean(_VECTOR, uint32))
def is_within(vector_N, most_bits):  # type: ignore[no-untyped-def]
    peak, least = np.uint32(0), _MAGNITUDE
    for n in range(vector_N.size):
        magnitude = bits_of(vector_N[n]) & _MAGNITUDE
        peak = max(peak, magnitude)
        least = min(least, magnitude if magnitude > 0 else _MAGNITUDE)
    return peak <= most_bits and least >= _SMALLEST


@_compiled(types.void(_SCALES, _input(int64), _SQUARES_OUT))
def bin_squares(bits_N, weights_N, bins_E):  # type: ignore[no-untyped-def]
    for n in range(bits_N.size):
        magnitude = np.int64(bits_N[n]) & 0x7FFF
        exponent = magnitude >> 7
        units = (magnitude & 0x7F) | (128 if exponent > 0 else 0)
        weight = weights_N[n] if weights_N.size else 1
        bins_E[exponent - 1 if exponent > 0 else 0] += units * units * weight


# -- one block of codes


@_inlined
def _low_code(pair):  # type: ignore[no-untyped-def]
    return ((np.int32(pair) & np.int32(15)) ^ np.int32(8)) - np.int32(8)


@_inlined
def _high_code(pair):  # type: ignore[no-untyped-def]
    return ((np.int32(pair) >> np.int32(4)) ^ np.int32(8)) - np.int32(8)


@_inlined
def _is_scale(scale_bits, least_bits, most_bits):  # type: ignore[no-untyped-def]
    """Return whether the scale is valid; negative and non-finite scales are larger as integers."""
    return scale_bits <= most_bits and (scale_bits >= least_bits or scale_bits == 0)


@_inlined
def _scale_of(vector_K, largest, least_bits, most_bits):  # type: ignore[no-untyped-def]
    """Return the bits of a block's scale, or all ones if a value is not finite."""
    peak = np.uint32(0)
    for k in range(BLOCK):
        peak = max(peak, bits_of(vector_K[k]) & _MAGNITUDE)
    if peak >= _INFINITY:
        return _NO_SCALE
    if peak == 0:
        return np.uint32(0)
    rounded_up = (bits_of(float_of(peak) / largest) + np.uint32(0xFFFF)) >> np.uint32(16)
    return min(max(rounded_up, least_bits), most_bits)


@_inlined
def _find_codes(vector_K, scale_bits, largest, codes_K):  # type: ignore[no-untyped-def]
    """Write the codes of a block, rounded to nearest, into the low bits of `codes_K`."""
    scale = float_of(scale_bits << np.uint32(16))
    inverse = _ONE / scale if scale_bits > 0 else _ZERO
    for k in range(BLOCK):
        codes_K[k] = bits_of(min(max(vector_K[k] * inverse, -largest), largest) + _TO_INTEGER)


@_inlined
def _draw_codes(vector_K, scale_bits, largest, noise_K, codes_K):  # type: ignore[no-untyped-def]
    """Write the codes of a block, rounded stochastically, into the low bits of `codes_K`."""
    scale = float_of(scale_bits << np.uint32(16))
    inverse = _ONE / scale if scale_bits > 0 else _ZERO
    for k in range(BLOCK):
        quotient = min(max(vector_K[k] * inverse, -largest), largest)
        codes_K[k] = bits_of(quotient + (np.float32(noise_K[k]) * _NOISE_STEP + _NOISE_START) + _TO_INTEGER)


@_inlined
def _pack_block4(codes_K, packed):  # type: ignore[no-untyped-def]
    """Write a block's codes, two per byte; return the sum of their squares."""
    for k in range(HALF):
        packed[k] = (codes_K[2 * k] & np.uint32(15)) | ((codes_K[2 * k + 1] & np.uint32(15)) << np.uint32(4))
    _, total = _squares_of_block4(packed)
    return total


@_inlined
def _squares_of_block4(packed):  # type: ignore[no-untyped-def]
    """Return the lowest code, and the sum of the squares of all."""
    lowest, total = np.int32(0), np.int32(0)
    for k in range(HALF):
        low, high = _low_code(packed[k]), _high_code(packed[k])
        lowest = min(lowest, low, high)
        total += low * low + high * high
    return lowest, total


@_inlined
def _decode_block4(scale_bits, packed, values_K):  # type: ignore[no-untyped-def]
    """Write a block's values; return its lowest code."""
    scale, lowest = float_of(scale_bits << np.uint32(16)), np.int32(0)
    for k in range(HALF):
        low, high = _low_code(packed[k]), _high_code(packed[k])
        lowest = min(lowest, low, high)
        values_K[2 * k] = np.float32(low) * scale
        values_K[2 * k + 1] = np.float32(high) * scale
    return lowest


@_inlined
def _decode_block8(scale_bits, packed, values_K):  # type: ignore[no-untyped-def]
    scale, lowest = float_of(scale_bits << np.uint32(16)), np.int32(0)
    for k in range(BLOCK):
        code = np.int32(np.int8(packed[k]))
        lowest = min(lowest, code)
        values_K[k] = np.float32(code) * scale
    return lowest


@_inlined
def _add_block(values_K, share, is_first, mean_K):  # type: ignore[no-untyped-def]
    if is_first:
        for k in range(BLOCK):
            mean_K[k] = values_K[k] * share
    else:
        for k in range(BLOCK):
            mean_K[k] = mean_K[k] + values_K[k] * share


# -- codes of 4 or 8 bits in whole blocks


@_compiled(boolean(_VECTOR, _NOISE, _LIMITS, _SCALES_OUT, _CODES_OUT))
def encode(vector_N, noise_N, limits, scale_bits_B, packed):  # type: ignore[no-untyped-def]
    codes_K, is_halved = np.empty(BLOCK, np.uint32), packed.size < vector_N.size
    largest, least_bits, most_bits = limits
    for b in range(scale_bits_B.size):
        vector_K = vector_N[b * BLOCK : b * BLOCK + BLOCK]
        scale_bits = _scale_of(vector_K, largest, least_bits, most_bits)
        if scale_bits == _NO_SCALE:
            return False
        scale_bits_B[b] = scale_bits
        if noise_N.size:
            _draw_codes(vector_K, scale_bits, largest, noise_N[b * BLOCK : b * BLOCK + BLOCK], codes_K)
        else:
            _find_codes(vector_K, scale_bits, largest, codes_K)
        if is_halved:  # written in place, as with a slice of `packed` this loop takes a fifth longer
            for k in range(HALF):
                pair = (codes_K[2 * k] & np.uint32(15)) | ((codes_K[2 * k + 1] & np.uint32(15)) << np.uint32(4))
                packed[b * HALF + k] = pair
        else:
            for k in range(BLOCK):
                packed[b * BLOCK + k] = np.uint8(codes_K[k])
    return True


@_compiled(boolean(_SCALES, _CODES, int32, _VECTOR_OUT))
def decode(scale_bits_B, packed, least, out_N):  # type: ignore[no-untyped-def]
    lowest, is_halved = np.int32(0), packed.size < out_N.size
    for b in range(scale_bits_B.size):
        scale_bits, out_K = np.uint32(scale_bits_B[b]), out_N[b * BLOCK : b * BLOCK + BLOCK]
        if is_halved:
            lowest = min(lowest, _decode_block4(scale_bits, packed[b * HALF : b * HALF + HALF], out_K))
        else:
            lowest = min(lowest, _decode_block8(scale_bits, packed[b * BLOCK : b * BLOCK + BLOCK], out_K))
    return lowest >= least


@_compiled(boolean(_SCALES, _CODES, int32, float32, boolean, _VECTOR_OUT))
def accumulate(scale_bits_B, packed, least, share, is_first, mean_N):  # type: ignore[no-untyped-def]
    values_K, lowest, is_halved = np.empty(BLOCK, np.float32), np.int32(0), packed.size < mean_N.size
    for b in range(scale_bits_B.size):
        scale_bits = np.uint32(scale_bits_B[b])
        if is_halved:
            lowest = min(lowest, _decode_block4(scale_bits, packed[b * HALF : b * HALF + HALF], values_K))
        else:
            lowest = min(lowest, _decode_block8(scale_bits, packed[b * BLOCK : b * BLOCK + BLOCK], values_K))
        _add_block(values_K, share, is_first, mean_N[b * BLOCK : b * BLOCK + BLOCK])
    return lowest >= least


@_compiled(boolean(_CODES, int32, _SQUARES_OUT))
def code_squares(packed, least, squares_B):  # type: ignore[no-untyped-def]
    lowest, is_halved = np.int32(0), packed.size < BLOCK * squares_B.size
    for b in range(squares_B.size):
        if is_halved:
            low, total = _squares_of_block4(packed[b * HALF : b * HALF + HALF])
            lowest = min(lowest, low)
        else:
            packed_K, total = packed[b * BLOCK : b * BLOCK + BLOCK], np.int32(0)
            for k in range(BLOCK):
                code = np.int32(np.int8(packed_K[k]))
                lowest = min(lowest, code)
                total += code * code
        squares_B[b] = total
    return lowest >= least


# -- radial means, as `outer/mean.py` defines them


@_inlined
def sum_of_block(wide_K):  # type: ignore[no-untyped-def]
    """Add halves to each other until one number is left, as `outer/mean.py` does; overwrites the input."""
    half = HALF
    while half:
        for k in range(half):
            wide_K[k] = wide_K[k] + wide_K[k + half]
        half >>= 1
    return wide_K[0]


@_inlined
def _add_direction(values_K, factor, is_first, direction_K):  # type: ignore[no-untyped-def]
    if is_first:
        for k in range(BLOCK):
            direction_K[k] = np.float64(values_K[k]) * factor
    else:
        for k in range(BLOCK):
            direction_K[k] = direction_K[k] + np.float64(values_K[k]) * factor


@_inlined
def _mend_length(direction_K, radius, least, square_K, mean_K):  # type: ignore[no-untyped-def]
    """Write the radial mean of a block: its direction, with the length defined in `outer/mean.py`."""
    for k in range(BLOCK):
        square_K[k] = direction_K[k] * direction_K[k]
    square = max(sum_of_block(square_K), least)
    stretch = radius / math.sqrt(square) if square > 0.0 else 0.0
    for k in range(BLOCK):
        mean_K[k] = np.float32(direction_K[k] * stretch)


@_inlined
def _length_of(vector_K, wide_K):  # type: ignore[no-untyped-def]
    for k in range(BLOCK):
        wide_K[k] = np.float64(vector_K[k]) * np.float64(vector_K[k])
    return math.sqrt(sum_of_block(wide_K))


@_inlined
def _shorten(values_K, length, longest):  # type: ignore[no-untyped-def]
    if length > longest:
        factor = np.float32(longest / length)
        for k in range(BLOCK):
            values_K[k] = values_K[k] * factor


@_compiled(types.void(_input(float32, 2), _VECTOR, _MARKS, _input(float64), _VECTOR_OUT))
def radial_mean(vectors_PN, shares_P, is_radial_B, longest_B, mean_N):  # type: ignore[no-untyped-def]
    wide_K, direction_K = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    values_K, is_limited = np.empty(BLOCK, np.float32), longest_B.size > 0
    for b in range(is_radial_B.size):
        start, is_radial = b * BLOCK, is_radial_B[b]
        mean_K, longest = mean_N[start : start + BLOCK], longest_B[b] if is_limited else np.inf
        radius, least_square = 0.0, 0.0
        for p in range(shares_P.size):
            vector_K = vectors_PN[p, start : start + BLOCK]
            if is_radial:
                share, length = np.float64(shares_P[p]), _length_of(vector_K, wide_K)
                radius += share * min(length, longest)
                least_square += share * share if length > 0.0 else 0.0
                _add_direction(vector_K, share / length if length > 0.0 else 0.0, p == 0, direction_K)
            elif is_limited:
                values_K[:] = vector_K
                _shorten(values_K, _length_of(vector_K, wide_K), longest)
                _add_block(values_K, shares_P[p], p == 0, mean_K)
            else:
                _add_block(vector_K, shares_P[p], p == 0, mean_K)
        if is_radial:
            _mend_length(direction_K, radius, least_square, wide_K, mean_K)


# -- fused operations on a span of 4-bit codes. They take the same steps in the same order as the loops above, so the
# -- bits are the same; but φ, m and θ are read from memory only once, and what is between is never written there.


@_compiled(float64(_VECTOR, _VECTOR, _LIMITS, _SCALES_OUT, _CODES_OUT, _SQUARES_OUT))
def contribute4(anchor_N, local_N, limits, scale_bits_B, packed, squares_B):  # type: ignore[no-untyped-def]
    delta_K, codes_K = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    lanes_K, (largest, least_bits, most_bits) = np.zeros(BLOCK, np.float64), limits
    for b in range(scale_bits_B.size):
        anchor_K, local_K = anchor_N[b * BLOCK : b * BLOCK + BLOCK], local_N[b * BLOCK : b * BLOCK + BLOCK]
        for k in range(BLOCK):
            delta_K[k] = anchor_K[k] - local_K[k]
        for k in range(BLOCK):
            wide = np.float64(delta_K[k])
            lanes_K[k] += wide * wide
        scale_bits = _scale_of(delta_K, largest, least_bits, most_bits)
        if scale_bits == _NO_SCALE:
            return np.nan
        scale_bits_B[b] = scale_bits
        _find_codes(delta_K, scale_bits, largest, codes_K)
        squares_B[b] = _pack_block4(codes_K, packed[b * HALF : b * HALF + HALF])
    total = 0.0
    for k in range(BLOCK):
        total += lanes_K[k]
    return total


@_compiled(boolean(_PARTS, _PARTS, _tuple(*[_VECTOR] * 3), _RATES, _LIMITS, _tuple(*[_VECTOR_OUT] * 3)))
def follow4(entry, own, vectors, rates, limits, next_vectors):  # type: ignore[no-untyped-def]
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
        lowest = min(lowest, _decode_block4(scale_bits, entry_codes[b * HALF : b * HALF + HALF], update_K))
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
            lowest = min(lowest, _decode_block4(own_bits, own_codes[b * HALF : b * HALF + HALF], own_K))
            for k in range(BLOCK):
                next_local_K[k] = local_K[k] + ((next_anchor_K[k] - anchor_K[k]) + own_K[k])
        else:
            for k in range(BLOCK):
                next_local_K[k] = local_K[k] + (next_anchor_K[k] - anchor_K[k])
    return lowest >= least and peak < _INFINITY


@_compiled(
    boolean(
        _input(uint16, 2), _input(uint8, 2), _VECTOR, _MARKS, _input(float64), _NOISE, _LIMITS,
        _SCALES_OUT, _CODES_OUT, int64[:, ::1], _SQUARES_OUT,
    )
)  # fmt: skip
def average4(  # type: ignore[no-untyped-def]
    scales_PB, codes_PN, shares_P, is_radial_B, longest_B, noise_N, limits, scale_bits_B, packed, squares_PB, squares_B
):
    values_K, mean_K, codes_K = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    direction_K, square_K = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    (largest, least_bits, most_bits), is_limited = limits, longest_B.size > 0
    lowest, least = np.int32(0), np.int32(-largest)
    for b in range(scale_bits_B.size):
        is_radial = is_radial_B.size > 0 and is_radial_B[b]
        radius, least_square, longest = 0.0, 0.0, longest_B[b] if is_limited else np.inf
        for p in range(shares_P.size):
            bits, share = np.uint32(scales_PB[p, b]), shares_P[p]
            if not _is_scale(bits, least_bits, most_bits):
                return False
            packed_K, scale, total = (
                codes_PN[p, b * HALF : b * HALF + HALF],
                float_of(bits << np.uint32(16)),
                np.int32(0),
            )
            for k in range(HALF):
                low, high = _low_code(packed_K[k]), _high_code(packed_K[k])
                lowest = min(lowest, low, high)
                total += low * low + high * high
                values_K[2 * k] = np.float32(low) * scale
                values_K[2 * k + 1] = np.float32(high) * scale
            squares_PB[p, b] = total
            wide, length = np.float64(scale), 0.0
            if is_radial or is_limited:
                length = math.sqrt(wide * wide * np.float64(total))
            if is_radial:
                wide_share = np.float64(share)
                radius += wide_share * min(length, longest)
                least_square += wide_share * wide_share if length > 0.0 else 0.0
                _add_direction(values_K, wide_share / length if length > 0.0 else 0.0, p == 0, direction_K)
                continue
            _shorten(values_K, length, longest)
            if p == 0:  # not `_add_block`: inlined here, it is a third slower
                for k in range(BLOCK):
                    mean_K[k] = values_K[k] * share
            else:
                for k in range(BLOCK):
                    mean_K[k] = mean_K[k] + values_K[k] * share
        if is_radial:
            _mend_length(direction_K, radius, least_square, square_K, mean_K)
        scale_bits = _scale_of(mean_K, largest, least_bits, most_bits)
        if scale_bits == _NO_SCALE:
            return False
        scale_bits_B[b] = scale_bits
        if noise_N.size:
            _draw_codes(mean_K, scale_bits, largest, noise_N[b * BLOCK : b * BLOCK + BLOCK], codes_K)
        else:
            _find_codes(mean_K, scale_bits, largest, codes_K)
        squares_B[b] = _pack_block4(codes_K, packed[b * HALF : b * HALF + HALF])
    return lowest >= least
