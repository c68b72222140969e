"""Scaled integer codes in whole blocks of 64: the loops of `operations.py`, one pass per operation.

A loop that finds an invalid value returns False, and the caller's NumPy code raises the detailed error. Multiply and
add round separately: numba fuses them only with `fastmath`, which must not be set here. Loops over a block have a
fixed length, so that the compiler needs no remainder loop and can use wide registers.

Legend: N = 64 B elements, B blocks, K = 64 elements of a block.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2p_diloco.kernels.bits import bits_of, float_of
from p2p_diloco.kernels.choice import frozen

BLOCK, HALF = 64, 32
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_TO_INTEGER = np.float32(12582912.0)
_NOISE_STEP = np.float32(2**-16)
_NOISE_START = np.float32(2**-17 - 0.5)
_ZERO, _ONE = np.float32(0), np.float32(1)
NO_SCALE = np.uint32(0xFFFFFFFF)

_compiled = njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)
# Inlined by numba, because passing an array to a function would count its references for every block.
_inlined = njit(inline="always", error_model="numpy", boundscheck=False)


@_inlined
def low_code(pair):  # type: ignore[no-untyped-def]
    return ((np.int32(pair) & np.int32(15)) ^ np.int32(8)) - np.int32(8)


@_inlined
def high_code(pair):  # type: ignore[no-untyped-def]
    return ((np.int32(pair) >> np.int32(4)) ^ np.int32(8)) - np.int32(8)


@_inlined
def scale_of(vector_K, largest, least_bits, most_bits):  # type: ignore[no-untyped-def]
    """Return the bits of a block's scale, or all ones if a value is not finite."""
    peak = np.uint32(0)
    for k in range(BLOCK):
        peak = max(peak, bits_of(vector_K[k]) & _MAGNITUDE)
    if peak >= _INFINITY:
        return NO_SCALE
    if peak == 0:
        return np.uint32(0)
    rounded_up = (bits_of(float_of(peak) / largest) + np.uint32(0xFFFF)) >> np.uint32(16)
    return min(max(rounded_up, least_bits), most_bits)


@_inlined
def find_codes(vector_K, scale_bits, largest, codes_K):  # type: ignore[no-untyped-def]
    """Write the codes of a block, rounded to nearest, into the low bits of `codes_K`."""
    scale = float_of(scale_bits << np.uint32(16))
    inverse = _ONE / scale if scale_bits > 0 else _ZERO
    for k in range(BLOCK):
        codes_K[k] = bits_of(min(max(vector_K[k] * inverse, -largest), largest) + _TO_INTEGER)


@_inlined
def draw_codes(vector_K, scale_bits, largest, noise_K, codes_K):  # type: ignore[no-untyped-def]
    """Write the codes of a block, rounded stochastically, into the low bits of `codes_K`."""
    scale = float_of(scale_bits << np.uint32(16))
    inverse = _ONE / scale if scale_bits > 0 else _ZERO
    for k in range(BLOCK):
        quotient = min(max(vector_K[k] * inverse, -largest), largest)
        codes_K[k] = bits_of(quotient + (np.float32(noise_K[k]) * _NOISE_STEP + _NOISE_START) + _TO_INTEGER)


@_inlined
def _encode_block(vector_N, noise_N, b, limits, codes_K):  # type: ignore[no-untyped-def]
    vector_K, (largest, least_bits, most_bits) = vector_N[b * BLOCK : b * BLOCK + BLOCK], limits
    scale_bits = scale_of(vector_K, largest, least_bits, most_bits)
    if noise_N.size:
        draw_codes(vector_K, scale_bits, largest, noise_N[b * BLOCK : b * BLOCK + BLOCK], codes_K)
    else:
        find_codes(vector_K, scale_bits, largest, codes_K)
    return scale_bits


@_compiled
def encode4(vector_N, noise_N, limits, scale_bits_B, packed):  # type: ignore[no-untyped-def]
    codes_K = np.empty(BLOCK, np.uint32)
    for b in range(scale_bits_B.size):
        scale_bits = _encode_block(vector_N, noise_N, b, limits, codes_K)
        if scale_bits == NO_SCALE:
            return False
        scale_bits_B[b] = scale_bits
        out = packed[b * HALF : b * HALF + HALF]
        for k in range(HALF):
            out[k] = (codes_K[2 * k] & np.uint32(15)) | ((codes_K[2 * k + 1] & np.uint32(15)) << np.uint32(4))
    return True


@_compiled
def encode8(vector_N, noise_N, limits, scale_bits_B, packed):  # type: ignore[no-untyped-def]
    codes_K = np.empty(BLOCK, np.uint32)
    for b in range(scale_bits_B.size):
        scale_bits = _encode_block(vector_N, noise_N, b, limits, codes_K)
        if scale_bits == NO_SCALE:
            return False
        scale_bits_B[b] = scale_bits
        out = packed[b * BLOCK : b * BLOCK + BLOCK]
        for k in range(BLOCK):
            out[k] = np.uint8(codes_K[k])
    return True


@_inlined
def decode_block4(scale_bits, held, values_K):  # type: ignore[no-untyped-def]
    """Write a block's values; return its lowest code."""
    scale, lowest = float_of(scale_bits << np.uint32(16)), np.int32(0)
    for k in range(HALF):
        low, high = low_code(held[k]), high_code(held[k])
        lowest = min(lowest, low, high)
        values_K[2 * k] = np.float32(low) * scale
        values_K[2 * k + 1] = np.float32(high) * scale
    return lowest


@_inlined
def _decode_block8(scale_bits, held, values_K):  # type: ignore[no-untyped-def]
    scale, lowest = float_of(scale_bits << np.uint32(16)), np.int32(0)
    for k in range(BLOCK):
        code = np.int32(np.int8(held[k]))
        lowest = min(lowest, code)
        values_K[k] = np.float32(code) * scale
    return lowest


@_compiled
def decode4(scale_bits_B, packed, least, out_N):  # type: ignore[no-untyped-def]
    lowest = np.int32(0)
    for b in range(scale_bits_B.size):
        held, out_K = packed[b * HALF : b * HALF + HALF], out_N[b * BLOCK : b * BLOCK + BLOCK]
        lowest = min(lowest, decode_block4(np.uint32(scale_bits_B[b]), held, out_K))
    return lowest >= least


@_compiled
def decode8(scale_bits_B, packed, least, out_N):  # type: ignore[no-untyped-def]
    lowest = np.int32(0)
    for b in range(scale_bits_B.size):
        here = slice(b * BLOCK, b * BLOCK + BLOCK)
        lowest = min(lowest, _decode_block8(np.uint32(scale_bits_B[b]), packed[here], out_N[here]))
    return lowest >= least


@_inlined
def _add_block(values_K, share, is_first, mean_K):  # type: ignore[no-untyped-def]
    if is_first:
        for k in range(BLOCK):
            mean_K[k] = values_K[k] * share
    else:
        for k in range(BLOCK):
            mean_K[k] = mean_K[k] + values_K[k] * share


@_compiled
def accumulate4(scale_bits_B, packed, least, share, is_first, mean_N):  # type: ignore[no-untyped-def]
    values_K, lowest = np.empty(BLOCK, np.float32), np.int32(0)
    for b in range(scale_bits_B.size):
        held = packed[b * HALF : b * HALF + HALF]
        lowest = min(lowest, decode_block4(np.uint32(scale_bits_B[b]), held, values_K))
        _add_block(values_K, share, is_first, mean_N[b * BLOCK : b * BLOCK + BLOCK])
    return lowest >= least


@_compiled
def accumulate8(scale_bits_B, packed, least, share, is_first, mean_N):  # type: ignore[no-untyped-def]
    values_K, lowest = np.empty(BLOCK, np.float32), np.int32(0)
    for b in range(scale_bits_B.size):
        here = slice(b * BLOCK, b * BLOCK + BLOCK)
        lowest = min(lowest, _decode_block8(np.uint32(scale_bits_B[b]), packed[here], values_K))
        _add_block(values_K, share, is_first, mean_N[here])
    return lowest >= least


@_compiled
def code_squares4(packed, least, squares_B):  # type: ignore[no-untyped-def]
    lowest = np.int32(0)
    for b in range(squares_B.size):
        held, total = packed[b * HALF : b * HALF + HALF], np.int32(0)
        for k in range(HALF):
            low, high = low_code(held[k]), high_code(held[k])
            lowest = min(lowest, low, high)
            total += low * low + high * high
        squares_B[b] = total
    return lowest >= least


@_compiled
def code_squares8(packed, least, squares_B):  # type: ignore[no-untyped-def]
    lowest = np.int32(0)
    for b in range(squares_B.size):
        held, total = packed[b * BLOCK : b * BLOCK + BLOCK], np.int32(0)
        for k in range(BLOCK):
            code = np.int32(np.int8(held[k]))
            lowest = min(lowest, code)
            total += code * code
        squares_B[b] = total
    return lowest >= least


@_compiled
def bin_squares(bits_N, weights_N, bins):  # type: ignore[no-untyped-def]
    for n in range(bits_N.size):
        magnitude = np.int64(bits_N[n]) & 0x7FFF
        exponent = magnitude >> 7
        units = (magnitude & 0x7F) | (128 if exponent > 0 else 0)
        weight = weights_N[n] if weights_N.size else 1
        bins[exponent - 1 if exponent > 0 else 0] += units * units * weight


def try_out() -> None:
    """Call each loop once, as `codec/` does."""
    vector_N, out_N = frozen(np.ones(BLOCK, np.float32)), np.empty(BLOCK, np.float32)
    scale_bits_B, noise_N = np.empty(1, np.uint16), np.zeros(BLOCK, np.uint16)
    limits = (np.uint32(0x0080), np.uint32(0x7E00))
    for encode, decode, accumulate, code_squares, largest in (
        (encode4, decode4, accumulate4, code_squares4, 7),
        (encode8, decode8, accumulate8, code_squares8, 127),
    ):
        packed, least = np.empty(BLOCK if largest > 7 else HALF, np.uint8), np.int32(-largest)
        encode(vector_N, noise_N, (np.float32(largest), *limits), scale_bits_B, packed)
        decode(frozen(scale_bits_B), frozen(packed), least, out_N)
        accumulate(frozen(scale_bits_B), frozen(packed), least, np.float32(0.5), True, out_N)
        code_squares(frozen(packed), least, np.empty(1, np.int64))
    bin_squares(frozen(scale_bits_B), frozen(np.empty(0, np.int64)), np.zeros(256, np.int64))
