"""Scaled integer codes in whole blocks of 64, of 4 or 8 bits: the NumPy form of each operation on them.

The NumPy form is the definition; the loop of the same name in `loops.py` has the same bits. Operations on codes of 4
bits get half as many bytes as elements. One that finds an invalid value returns False, or NaN, and its outputs must not
be used then; the caller raises the detailed error.

Legend: N = 64 B elements of a span, B blocks, K elements of a block, P vectors of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.vectors import (
    BLOCK,
    CACHED_ELEMENTS,
    Bits,
    Bytes,
    Integers,
    Vector,
    Wide,
    compiled_loops,
    iterate_blocks,
    with_loop,
)

Codes: TypeAlias = npt.NDArray[np.int8]
Marks: TypeAlias = npt.NDArray[np.bool_]
Parts: TypeAlias = tuple[Bits, Bytes]
"""The bits of all scales, shape (B,), and the packed codes."""
Rates: TypeAlias = tuple[np.float32, np.float32]
"""η, μ."""
Limits: TypeAlias = tuple[np.float32, np.uint32, np.uint32]
"""The largest code, and the bits of the smallest and largest scale."""

NO_NOISE: Bits = np.empty(0, dtype=np.uint16)
_CACHED_BLOCKS = 2 * CACHED_ELEMENTS // BLOCK
_LOW_NIBBLES = np.uint16(0x0F0F)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# Adding 1.5 · 2^23 leaves the nearest integer (ties to even) in the lowest bits of a float32.
_TO_INTEGER = np.float32(12582912.0)


def pack4(codes_N: Bytes) -> Bytes:
    """Return the bytes of an even number of 4-bit codes, the earlier one in the low nibble; overwrites the input."""
    # One 16-bit lane holds a pair: the shift moves the second code next to the first.
    pairs = codes_N.view("<u2")
    pairs &= _LOW_NIBBLES
    pairs |= pairs >> 4
    return pairs.astype(np.uint8)


def unpack4(packed: Bytes) -> Codes:
    """Return the signed codes of all nibbles."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= _LOW_NIBBLES
    nibbles_N = pairs.view(np.uint8)
    # Flipping bit 3 and subtracting 8 extends the sign.
    nibbles_N ^= 8
    nibbles_N -= 8
    return nibbles_N.view(np.int8)


def widened(bits_N: Bits) -> Vector:
    """Return the values of bfloat16 numbers."""
    return (bits_N.astype(np.uint32) << 16).view(np.float32)


@with_loop()
def encode(vector_N: Vector, noise_N: Bits, limits: Limits, scale_bits_B: Bits, packed: Bytes) -> bool:
    """Encode into scales and codes; False if a value is not finite. Rounds to nearest if `noise_N` is empty."""
    scratch_BK = np.empty((min(_CACHED_BLOCKS, len(scale_bits_B)), BLOCK), dtype=np.float32)
    vector_BK, packed_B = vector_N.reshape(-1, BLOCK), _rows(packed, len(scale_bits_B))
    noise_BK, is_halved = noise_N.reshape(-1, BLOCK), len(packed) < len(vector_N)
    with np.errstate(under="ignore"):
        for here in iterate_blocks(len(scale_bits_B), _CACHED_BLOCKS):
            chunk_BK, out_BK = vector_BK[here], scratch_BK[: here.stop - here.start]
            if not _find_scales(chunk_BK, limits, scale_bits_B[here], out_BK):
                return False
            codes_N = _round_to_codes(chunk_BK, noise_BK[here], scale_bits_B[here], limits[0], out_BK)
            packed_B[here] = (pack4(codes_N) if is_halved else codes_N).reshape(len(chunk_BK), -1)
    return True


def _find_scales(chunk_BK: Vector, limits: Limits, scale_bits_B: Bits, scratch_BK: Vector) -> bool:
    """Write the blocks' scales; return False if a value is not finite."""
    magnitude_bits_BK = np.bitwise_and(chunk_BK.view(np.uint32), _MAGNITUDE, out=scratch_BK.view(np.uint32))
    # Magnitudes are ordered like their bits: numbers, then infinity, then NaN.
    peak_bits_B = np.maximum.reduce(magnitude_bits_BK, axis=1)
    if peak_bits_B.max() >= _INFINITY:
        return False
    largest, least_bits, most_bits = limits
    quotient_B = peak_bits_B.view(np.float32) / largest
    rounded_up_B = (quotient_B.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    np.clip(rounded_up_B, least_bits, most_bits, out=rounded_up_B)
    rounded_up_B[peak_bits_B == 0] = 0
    scale_bits_B[:] = rounded_up_B
    return True


def _round_to_codes(
    chunk_BK: Vector, noise_BK: Bits, scale_bits_B: Bits, largest: np.float32, scratch_BK: Vector
) -> Bytes:
    """Return the codes of blocks in two's complement.

    The quotient is value · (1 / scale), with two float32 roundings. It is clipped (rounding may make it exceed the
    largest code) and then rounded.
    """
    scales_B = widened(scale_bits_B)
    inverse_B = np.divide(np.float32(1), scales_B, out=np.zeros_like(scales_B), where=scales_B > 0)
    np.multiply(chunk_BK, inverse_B[:, None], out=scratch_BK)
    np.clip(scratch_BK, -largest, largest, out=scratch_BK)
    if len(noise_BK):
        # Nearest rounding after adding (r + ½) / 2^16 - ½, which is strictly between -½ and ½: zeros stay zeros.
        offset_BK = noise_BK.astype(np.float32)
        offset_BK *= np.float32(2**-16)
        offset_BK += np.float32(2**-17 - 0.5)
        scratch_BK += offset_BK
    scratch_BK += _TO_INTEGER
    return scratch_BK.view(np.uint32).ravel().astype(np.uint8)


def _rows(packed: Bytes, blocks: int) -> Bytes:
    return packed.reshape(blocks, packed.size // max(blocks, 1))


@with_loop()
def decode(scale_bits_B: Bits, packed: Bytes, least: np.int32, out_N: Vector) -> bool:
    """Decode; False if a code is below `least`."""
    scales_B, out_BK, packed_B = widened(scale_bits_B), out_N.reshape(-1, BLOCK), _rows(packed, len(scale_bits_B))
    for here in iterate_blocks(len(scale_bits_B), _CACHED_BLOCKS):
        codes_N = _unpacked(packed_B[here])
        if codes_N.min() < least:
            return False
        out_BK[here] = codes_N.reshape(-1, BLOCK)
        out_BK[here] *= scales_B[here, None]
    return True


def _unpacked(packed_B: Bytes) -> Codes:
    codes_N = packed_B.ravel()
    return codes_N.view(np.int8) if packed_B.shape[1] == BLOCK else unpack4(codes_N)


@with_loop()
def accumulate(
    scale_bits_B: Bits, packed: Bytes, least: np.int32, share: np.float32, is_first: bool, mean_N: Vector
) -> bool:
    """Add share times each value to the mean, or set it if `is_first`; False if a code is below `least`."""
    values_N = np.empty_like(mean_N)
    if not decode(scale_bits_B, packed, least, values_N):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(values_N, share, out=mean_N if is_first else values_N)
        if not is_first:
            np.add(mean_N, values_N, out=mean_N)
    return True


def lengths_of(parts: Parts, least: np.int32) -> Wide | None:
    """Return the length of each block of an encoding of whole blocks, shape (B,); None if a code is below `least`."""
    scale_bits_B, packed = parts
    squares_B = np.empty(len(scale_bits_B), np.int64)
    if not code_squares(packed, least, squares_B):
        return None
    scales_B = widened(scale_bits_B).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths_B: Wide = np.sqrt(scales_B * scales_B * squares_B)
    return lengths_B


@with_loop()
def code_squares(packed: Bytes, least: np.int32, squares_B: Integers) -> bool:
    """Write the sum of the squared codes of each block; False if a code is below `least`."""
    packed_B = _rows(packed, len(squares_B))
    for here in iterate_blocks(len(squares_B), _CACHED_BLOCKS):
        codes_N = _unpacked(packed_B[here])
        if codes_N.min() < least:
            return False
        # 64 · 127² < 2^24: float32 represents every partial sum exactly, in any order.
        codes_BK = codes_N.astype(np.float32).reshape(-1, BLOCK)
        squares_B[here] = np.einsum("bk,bk->b", codes_BK, codes_BK)
    return True


# -- fused passes over a span of 4-bit codes. Their NumPy form is a refusal: the caller takes the steps one by one.


@with_loop()
def contribute4(
    anchor_N: Vector, local_N: Vector, limits: Limits, scale_bits_B: Bits, packed: Bytes, squares_B: Integers
) -> float:
    """Encode φ − θ, rounded to nearest, with the sum of the squared codes of each block.

    Returns the sum of the squares of φ − θ, in the order of `sum_of_squares`; NaN if a value is not finite.
    """
    return math.nan


@with_loop()
def follow4(
    entry: Parts,
    own: Parts,
    vectors: tuple[Vector, Vector, Vector],
    rates: Rates,
    limits: Limits,
    next_vectors: tuple[Vector, Vector, Vector],
) -> bool:
    """Do an outer step along an entry, and merge θ with `keep`: remove its own contribution, if there is one.

    Args:
        entry, own: `own` is empty if there is nothing to remove from θ.
        vectors: φ, m, θ.
        next_vectors: outputs for the next φ, m and θ.
    Returns False for an invalid code or scale, or if φ is not finite.
    """
    return False


def average4(
    parts: Sequence[Parts],
    shares: Sequence[np.float32],
    is_radial_B: Marks,
    longest_B: Wide,
    draw_noise: Callable[[], Bits],
    limits: Limits,
    scale_bits_B: Bits,
    packed: Bytes,
    squares_PB: Integers,
) -> bool:
    """Encode Σ share · value, with the squared codes of each block of each part and then of the mean.

    Args:
        is_radial_B: blocks that use the radial mean (`outer/mean.py`); none if it is empty.
        longest_B: lengths at which blocks are cut, likewise; none are if it is empty.
        draw_noise: returns random numbers for rounding; none of them rounds to nearest.
    Returns False for an invalid code or scale, or if a sum is not finite.
    """
    loops = compiled_loops()
    if loops is None:
        return False
    scales_PB, codes_PN = (np.stack(both) for both in zip(*parts, strict=True))
    into = (scale_bits_B, packed, squares_PB[:-1], squares_PB[-1])
    rule = (np.array(shares, np.float32), is_radial_B, longest_B)
    return bool(loops.average4(scales_PB, codes_PN, *rule, draw_noise(), limits, *into))
