"""The operations on vectors of which there is a compiled loop: the NumPy form of each, and the table of all.

The NumPy form is the definition; a loop has the same bits. Callers call the operation, and `choice.py` chooses the
form. Long vectors are processed in blocks that fit into a core's cache: several passes over a block cost less than one
pass over the whole vector. The arithmetic is elementwise, so that does not change the result.

Multiply and add round separately. An operation that finds an invalid value returns False, and its outputs must not be
used then; the caller raises the detailed error.

Legend: N = elements of one span, B = blocks of 64 elements, K = elements of a block, P = vectors of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.kernels.bounds import SMALLEST
from p2p_diloco.kernels.choice import Operation, frozen, loops_of

BLOCK = 64
"""Elements that share a scale of a codec, and a length of a radial mean."""
CACHED_ELEMENTS = 16_384
"""64 KiB per operand: four of them fit into the second-level cache of any machine of the last ten years."""

Vector: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Codes: TypeAlias = npt.NDArray[np.int8]
Bits: TypeAlias = npt.NDArray[np.uint16]
Integers: TypeAlias = npt.NDArray[np.int64]
Rates: TypeAlias = tuple[np.float32, np.float32]
"""η, μ."""
Limits: TypeAlias = tuple[np.float32, np.uint32, np.uint32]
"""The largest code, and the bits of the smallest and largest scale."""
Pack: TypeAlias = Callable[[Bytes], Bytes]
Unpack: TypeAlias = Callable[[Bytes], Codes]
_Wide: TypeAlias = npt.NDArray[np.float64]

NO_NOISE: Bits = np.empty(0, dtype=np.uint16)
_CACHED_BLOCKS = 2 * CACHED_ELEMENTS // BLOCK
_LOW_NIBBLES = np.uint16(0x0F0F)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# Adding 1.5 · 2^23 leaves the nearest integer (ties to even) in the lowest bits of a float32.
_TO_INTEGER = np.float32(12582912.0)
_FRACTION_BITS = 7
# A float64 bin holds integers exactly up to 2^53, more than 2^14 addends of at most 2^36 each.
_BINNED_ELEMENTS = 1 << 14


def iterate_blocks(elements: int, most: int = CACHED_ELEMENTS) -> Iterator[slice]:
    """Yield slices that cover `range(elements)` in order, each element once."""
    for start in range(0, elements, most):
        yield slice(start, min(start + most, elements))


# -- whole vectors


def zero_small(vector_N: Vector) -> None:
    """Set values to zero, in place, that are too small for the agreed state; see `kernels/bounds.py`."""
    is_kept_N = np.abs(vector_N) >= SMALLEST
    if not is_kept_N.all():
        vector_N *= is_kept_N  # faster than masked assignment; NaN stays NaN
        vector_N += 0.0  # no negative zeros


def _outer_step(
    anchor_N: Vector, momentum_N: Vector, update_N: Vector, rates: Rates, next_anchor_N: Vector, next_momentum_N: Vector
) -> bool:
    """m ← μ m + g; φ ← φ − η (g + μ m); too small values become zero. False if an element of φ is not finite."""
    rate, momentum = rates
    with np.errstate(over="ignore", invalid="ignore"):
        for block in iterate_blocks(len(anchor_N)):
            update_B, momentum_B, anchor_B = update_N[block], next_momentum_N[block], next_anchor_N[block]
            np.multiply(momentum_N[block], momentum, out=momentum_B)
            np.add(momentum_B, update_B, out=momentum_B)
            zero_small(momentum_B)
            np.multiply(momentum_B, momentum, out=anchor_B)
            np.add(update_B, anchor_B, out=anchor_B)
            np.multiply(anchor_B, rate, out=anchor_B)
            np.subtract(anchor_N[block], anchor_B, out=anchor_B)
            zero_small(anchor_B)
    return _is_finite(next_anchor_N)


def _follow(local_N: Vector, before_N: Vector, after_N: Vector, leaving_N: Vector, merged_N: Vector) -> None:
    """θ + ((φ_new − φ_old) + c). The small terms come first: c nearly cancels the move, so θ is rounded only once."""
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged θ is handled by its island, not by the merge
        for block in iterate_blocks(len(local_N)):
            merged_B = merged_N[block]
            np.subtract(after_N[block], before_N[block], out=merged_B)
            np.add(merged_B, leaving_N[block], out=merged_B)
            np.add(local_N[block], merged_B, out=merged_B)


def _sum_of_squares(vector_N: Vector) -> float:
    """Return the sum of the squares in float64; its order, and so its last digit, is another one than the loop's."""
    wide_blocks = (vector_N[block].astype(np.float64) for block in iterate_blocks(len(vector_N)))
    return math.fsum(float(np.sum(wide * wide)) for wide in wide_blocks)


def _is_finite(vector_N: Vector) -> bool:
    """Return whether all values are finite."""
    return all(bool(np.isfinite(vector_N[block]).all()) for block in iterate_blocks(len(vector_N)))


def _is_within(vector_N: Vector, most_bits: np.uint32) -> bool:
    """Return whether all values are 0, or not too small and at most a float, given by its bits, in magnitude."""
    magnitude_N = np.abs(vector_N)
    return bool(np.all((magnitude_N == 0) | ((magnitude_N >= SMALLEST) & (magnitude_N <= most_bits.view(np.float32)))))


def _of_vectors(name: str, by_numpy: Callable[..., Any], outputs: int) -> Operation:
    return Operation("vectors", name, by_numpy, outputs=outputs, fewest=BLOCK, are_vectors=True)


outer_step = _of_vectors("outer_step", _outer_step, 2)
follow = _of_vectors("follow", _follow, 1)
sum_of_squares = _of_vectors("sum_of_squares", _sum_of_squares, 0)
is_finite = _of_vectors("is_finite", _is_finite, 0)
is_within = _of_vectors("is_within", _is_within, 0)


# -- codes in whole blocks, in the layout of `codec/blocks.py`


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


def _encode(pack: Pack, vector_N: Vector, noise_N: Bits, limits: Limits, scale_bits_B: Bits, packed: Bytes) -> bool:
    """Encode into scales and codes; False if a value is not finite. Rounds to nearest if `noise_N` is empty."""
    scratch_BK = np.empty((min(_CACHED_BLOCKS, len(scale_bits_B)), BLOCK), dtype=np.float32)
    vector_BK, packed_B = vector_N.reshape(-1, BLOCK), _rows(packed, len(scale_bits_B))
    noise_BK = noise_N.reshape(-1, BLOCK)
    with np.errstate(under="ignore"):
        for here in iterate_blocks(len(scale_bits_B), _CACHED_BLOCKS):
            chunk_BK, out_BK = vector_BK[here], scratch_BK[: here.stop - here.start]
            if not _find_scales(chunk_BK, limits, scale_bits_B[here], out_BK):
                return False
            codes_N = _round_to_codes(chunk_BK, noise_BK[here], scale_bits_B[here], limits[0], out_BK)
            packed_B[here] = pack(codes_N).reshape(len(chunk_BK), -1)
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


def widened(bits_N: Bits) -> Vector:
    """Return the values of bfloat16 numbers."""
    return (bits_N.astype(np.uint32) << 16).view(np.float32)


def _decode(unpack: Unpack, scale_bits_B: Bits, packed: Bytes, least: np.int32, out_N: Vector) -> bool:
    """Decode; False if a code is below `least`."""
    scales_B, out_BK, packed_B = widened(scale_bits_B), out_N.reshape(-1, BLOCK), _rows(packed, len(scale_bits_B))
    for here in iterate_blocks(len(scale_bits_B), _CACHED_BLOCKS):
        codes_N = unpack(packed_B[here].ravel())
        if codes_N.min() < least:
            return False
        out_BK[here] = codes_N.reshape(-1, BLOCK)
        out_BK[here] *= scales_B[here, None]
    return True


def _accumulate(
    unpack: Unpack,
    scale_bits_B: Bits,
    packed: Bytes,
    least: np.int32,
    share: np.float32,
    is_first: bool,
    mean_N: Vector,
) -> bool:
    """Add share times each value to the mean, or set it if `is_first`; False if a code is below `least`."""
    values_N = np.empty_like(mean_N)
    if not _decode(unpack, scale_bits_B, packed, least, values_N):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(values_N, share, out=mean_N if is_first else values_N)
        if not is_first:
            np.add(mean_N, values_N, out=mean_N)
    return True


def _code_squares(unpack: Unpack, packed: Bytes, least: np.int32, squares_B: Integers) -> bool:
    """Write the sum of the squared codes of each block; False if a code is below `least`."""
    packed_B = _rows(packed, len(squares_B))
    for here in iterate_blocks(len(squares_B), _CACHED_BLOCKS):
        codes_N = unpack(packed_B[here].ravel())
        if codes_N.min() < least:
            return False
        # 64 · 127² < 2^24: float32 represents every partial sum exactly, in any order.
        codes_BK = codes_N.astype(np.float32).reshape(-1, BLOCK)
        squares_B[here] = np.einsum("bk,bk->b", codes_BK, codes_BK)
    return True


def _bin_squares(bits_N: Bits, weights_N: Integers, bins_E: Integers) -> None:
    """Add weight · square of each bfloat16 value exactly to the bin of its exponent, in units of its last place.

    Without weights all are 1. Squares are integers below 2^16 and weights at most 2^20, so a bin holds 2^27 addends.
    """
    for chunk in iterate_blocks(len(bits_N), _BINNED_ELEMENTS):
        shift_N, integer_N = split_float(bits_N[chunk] & np.uint16(0x7FFF), _FRACTION_BITS)
        square_N = integer_N * integer_N * (weights_N[chunk] if len(weights_N) else 1)
        bins_E += np.bincount(shift_N, weights=square_N, minlength=len(bins_E)).astype(np.int64)


def split_float(magnitude_N: npt.NDArray[np.unsignedinteger], fraction_bits: int) -> tuple[Integers, Integers]:
    """Split each magnitude into `integer · 2^shift` units of the smallest subnormal; return shifts and integers."""
    exponent_N = (magnitude_N >> fraction_bits).astype(np.int64)
    fraction_N = magnitude_N.astype(np.int64) & ((1 << fraction_bits) - 1)
    integer_N = fraction_N | ((exponent_N > 0).astype(np.int64) << fraction_bits)
    return np.maximum(exponent_N, 1) - 1, integer_N


def _of_codes(name: str, by_numpy: Any, outputs: int, ways: dict[int, Any]) -> dict[int, Operation]:
    """Return an operation for each number of bits of a code, with its way to pack or unpack."""
    return {bits: Operation("blocks", f"{name}{bits}", partial(by_numpy, way), outputs) for bits, way in ways.items()}


PACK: dict[int, Pack] = {4: pack4, 8: lambda codes_N: codes_N}
UNPACK: dict[int, Unpack] = {4: unpack4, 8: lambda packed: packed.view(np.int8)}
encode = _of_codes("encode", _encode, 2, PACK)
decode = _of_codes("decode", _decode, 1, UNPACK)
accumulate = _of_codes("accumulate", _accumulate, 1, UNPACK)
code_squares = _of_codes("code_squares", _code_squares, 1, UNPACK)
bin_squares = Operation("blocks", "bin_squares", _bin_squares, outputs=1)


# -- radial means, as `outer/radial.py` defines them


def _radial_mean(vectors_PN: Vector, shares_P: Vector, is_radial_B: npt.NDArray[np.bool_], mean_N: Vector) -> None:
    """Write the mean: radial in marked blocks; plain, rounded after each step, in the others."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(vectors_PN[0], shares_P[0], out=mean_N)
        for vector_N, share in zip(vectors_PN[1:], shares_P[1:], strict=True):
            mean_N += vector_N * share
        vectors_BK = [vector_N.reshape(-1, BLOCK)[is_radial_B] for vector_N in vectors_PN]
        mean_N.reshape(-1, BLOCK)[is_radial_B] = _radial(vectors_BK, list(shares_P))


def _radial(vectors_BK: Sequence[Vector], shares: Sequence[np.float32]) -> Vector:
    direction_BK = np.full(vectors_BK[0].shape, -0.0)  # -0.0 + x is x for every x, including -0.0
    radius_B, least_B = np.zeros(len(direction_BK)), np.zeros(len(direction_BK))
    for vector_BK, share in zip(vectors_BK, map(float, shares), strict=True):
        wide_BK = vector_BK.astype(np.float64)
        length_B = np.sqrt(sums_of_blocks(wide_BK * wide_BK))
        is_there_B = length_B > 0.0
        factor_B = np.divide(share, length_B, out=np.zeros_like(length_B), where=is_there_B)
        direction_BK += wide_BK * factor_B[:, None]
        radius_B += share * length_B
        least_B += np.where(is_there_B, share * share, 0.0)
    square_B = np.maximum(sums_of_blocks(direction_BK * direction_BK), least_B)
    stretch_B = np.divide(radius_B, np.sqrt(square_B), out=np.zeros_like(radius_B), where=square_B > 0.0)
    return (direction_BK * stretch_B[:, None]).astype(np.float32)


def sums_of_blocks(values_BK: _Wide) -> _Wide:
    """Return the sum of each block by adding halves to each other until one number is left.

    NumPy and a compiled loop can both use this order on any hardware.
    """
    half = BLOCK // 2
    while half:
        values_BK = values_BK[:, :half] + values_BK[:, half:]
        half //= 2
    return values_BK[:, 0]


radial_mean = Operation("radial", "radial_mean", _radial_mean, outputs=1)


# -- fused passes over a span of 4-bit codes. Their NumPy form is a refusal: the caller takes the steps one by one.


contribute4 = Operation("spans", "contribute4", lambda *_: math.nan, outputs=3)


def follow4(
    entry: tuple[Bits, Bytes], own: tuple[Bits, Bytes], vectors: tuple[Vector, ...], rates: Any, limits: Any, into: Any
) -> bool:
    """Do an outer step along an entry, and merge θ with `keep`; see `kernels/spans.py`."""
    loops = loops_of("spans")
    return loops is not None and loops.follow4(entry, own, tuple(map(frozen, vectors)), rates, limits, into)


def average4(
    parts: Sequence[tuple[Bits, Bytes]],
    shares: Sequence[np.float32],
    is_radial_B: npt.NDArray[np.bool_],
    draw_noise: Callable[[], Bits],
    limits: Any,
    scale_bits_B: Bits,
    packed: Bytes,
    squares_PB: Integers,
) -> bool:
    """Encode the mean of parts, with the squared codes of each part and then of the mean; see `kernels/spans.py`."""
    loops = loops_of("spans")
    if loops is None:
        return False
    scales_PB, codes_PN = (np.stack(both) for both in zip(*parts, strict=True))
    shares_P, marks_B, squares = np.array(shares, np.float32), frozen(is_radial_B), (squares_PB[:-1], squares_PB[-1])
    into = (scale_bits_B, packed, *squares)
    return bool(loops.average4(scales_PB, codes_PN, shares_P, marks_B, draw_noise(), limits, *into))
