"""topk2: the 128 largest elements of each block of 4,096, two bits each: 0.45 bits per parameter. Contributions only.

What is not sent stays in the island's parameters and is part of its next difference, so a contribution can omit most
elements. A row mean or an entry cannot: omitted elements would be lost.

Layout, B = ceil(N / 4,096), K = sum over blocks of max(1, L // 32): B low and B high bfloat16 magnitudes
(little-endian); K places within their blocks, strictly increasing in each, twelve bits, two in three bytes, the earlier
in the low bits, padded with a zero to an even number; K codes of two bits, four per byte, the earliest in the lowest
bits, padded with zeros. Bit 0 of a code means high instead of low, bit 1 means negative. All other elements are zero.

Low is the mean of the kept magnitudes at or below the mean of all, high the mean of those above. A value between zero
and twice the mean of some numbers is no further from them than zero is. So the residual of a vector is never longer
than the vector.

Axes: N elements of a span, B blocks of a span or chunk, L elements of a block, K kept elements of a block or span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.checks import bytes_of_size, contiguous_vector, refuse_non_finite_update
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.codec.interface import Codec, Encoded, Vector
from p2p_diloco.errors import FrameError
from p2p_diloco.kernels.bounds import LARGEST, SMALLEST

BLOCK_ELEMENTS = 4096
ELEMENTS_PER_KEPT = 32
_BLOCK_KEPT = BLOCK_ELEMENTS // ELEMENTS_PER_KEPT
# 64 blocks, 1 MiB of float32: smaller chunks would need more calls.
_CHUNK_ELEMENTS = 1 << 18
_SCALE_BYTES = 2
_SMALLEST_SCALE, _LARGEST_SCALE = SMALLEST, LARGEST
_SMALLEST_SCALE_BITS = int(np.float32(_SMALLEST_SCALE).view(np.uint32)) >> 16
_LARGEST_SCALE_BITS = int(np.float32(_LARGEST_SCALE).view(np.uint32)) >> 16
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# A float64 has 52 fraction bits, a bfloat16 has 7.
_CUT_BITS = np.uint64(52 - 7)
_HIGH, _NEGATIVE = np.uint8(1), np.uint8(2)
_CODE_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)

Bits = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.intp]
ScaleBits = npt.NDArray[np.uint16]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK2Codec(Codec):
    """The largest elements of each block, rounded to one of two magnitudes; supports only rounding to nearest."""

    name: str = "topk2"
    block_elements: int = BLOCK_ELEMENTS

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector: 228 bytes for a whole block, at least 8 for a short one."""
        kept = num_kept(elements)
        return 2 * _SCALE_BYTES * num_blocks(elements) + _place_bytes(kept) + _code_bytes(kept)

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Keep the largest magnitudes of each block, the earlier of equal ones; see `Codec.encode`.

        Raises:
            ValueError: there is a rounding seed. The omitted elements do not depend on it, so errors would not average
                out.
        """
        if rounding_seed is not None:
            raise ValueError("topk2 cannot round stochastically; encode without a rounding seed, or use int4")
        vector_N = contiguous_vector(vector_N)
        scale_bits_2B = np.empty((2, num_blocks(vector_N.size)), dtype="<u2")
        places_K = np.empty(num_kept(vector_N.size), dtype=np.uint16)
        codes_K = np.empty(places_K.size, dtype=np.uint8)
        block, first = 0, 0
        for bits_BL in _chunks_of(vector_N.view(np.uint32)):
            chunk_places_BK, kept_BK = _select(bits_BL, num_kept(bits_BL.shape[1]))
            # Non-finite values are the largest, so they are kept.
            if (kept_BK & _MAGNITUDE).max() >= _INFINITY:
                refuse_non_finite_update(vector_N)
            low_B, high_B, is_high_BK = _split(kept_BK)
            blocks, kept = slice(block, block + len(kept_BK)), slice(first, first + kept_BK.size)
            scale_bits_2B[0, blocks], scale_bits_2B[1, blocks] = _to_scale_bits(low_B), _to_scale_bits(high_B)
            places_K[kept] = chunk_places_BK.reshape(-1)
            # Negative zero counts as positive.
            codes_K[kept] = (is_high_BK * _HIGH + (kept_BK > ~_MAGNITUDE) * _NEGATIVE).reshape(-1)
            block, first = blocks.stop, kept.stop
        return scale_bits_2B.tobytes() + _pack_places(places_K).tobytes() + _pack_codes(codes_K).tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Place the magnitudes among zeros; see `Codec.decode`."""
        received = self._received(encoded, elements)
        # Subtract from zero instead of negating, to avoid negative zeros.
        values_B4 = np.empty((received.low_bits_B.size, 4), dtype=np.float32)
        values_B4[:, 0], values_B4[:, 1] = _widen(received.low_bits_B), _widen(received.high_bits_B)
        np.subtract(np.float32(0), values_B4[:, :2], out=values_B4[:, 2:])
        vector_N = np.zeros(elements, dtype=np.float32)
        vector_N[received.positions_K] = values_B4[_blocks_of(received.codes_K.size), received.codes_K]
        return vector_N

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact sum over blocks of low² and high² times their counts; see `Codec.squared_norm`."""
        received = self._received(encoded, elements)
        num_scales = received.low_bits_B.size
        block_K = _blocks_of(received.codes_K.size)
        num_high_B = np.bincount(block_K[(received.codes_K & _HIGH) != 0], minlength=num_scales)
        num_low_B = np.bincount(block_K, minlength=num_scales) - num_high_B
        scale_bits_2B = np.concatenate((received.low_bits_B, received.high_bits_B))
        return squared_norm_of_bfloat16(scale_bits_2B, np.concatenate((num_low_B, num_high_B)))

    def _received(self, encoded: Encoded, elements: int) -> _Received:
        """Parse bytes from a peer, and refuse what no encoder writes."""
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        blocks, kept = num_blocks(elements), num_kept(elements)
        places_at = 2 * _SCALE_BYTES * blocks
        codes_at = places_at + _place_bytes(kept)
        low_bits_B, high_bits_B = received[:places_at].view("<u2").reshape(2, blocks)
        _check_scales(low_bits_B, high_bits_B)
        places = _unpack_places(received[places_at:codes_at])
        codes = _unpack_codes(received[codes_at:])
        for padding, what in ((places[kept:], "place"), (codes[kept:], "code")):
            if padding.any():
                raise FrameError(f"topk2 span of {elements} elements has a {what} {kept + 1}; expected 0 there")
        return _Received(
            low_bits_B=low_bits_B,
            high_bits_B=high_bits_B,
            positions_K=_checked_positions(places[:kept], elements),
            codes_K=codes[:kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Received:
    """A checked encoding: scales, positions of the kept elements in the span, and their codes."""

    low_bits_B: ScaleBits
    high_bits_B: ScaleBits
    positions_K: Positions
    codes_K: Bytes


def num_blocks(elements: int) -> int:
    """Return the number of blocks; the last one may be short."""
    return -(-elements // BLOCK_ELEMENTS)


def num_kept(elements: int) -> int:
    """Return the number of kept elements: one of 32 in each block, and at least one per block."""
    whole, short = divmod(elements, BLOCK_ELEMENTS)
    return whole * _BLOCK_KEPT + (max(1, short // ELEMENTS_PER_KEPT) if short else 0)


def _place_bytes(kept: int) -> int:
    return 3 * -(-kept // 2)


def _code_bytes(kept: int) -> int:
    return -(-kept // 4)


def _blocks_of(kept: int) -> Positions:
    """Return the block of each kept element; all blocks except the last keep the same number."""
    return np.arange(kept, dtype=np.intp) // _BLOCK_KEPT


def _check_scales(low_bits_B: ScaleBits, high_bits_B: ScaleBits) -> None:
    num = low_bits_B.size
    for bits_B in (low_bits_B, high_bits_B):
        # One comparison refuses negative, infinite and NaN scales: as integers they are all larger.
        wrong_B = (bits_B > _LARGEST_SCALE_BITS) | ((bits_B < _SMALLEST_SCALE_BITS) & (bits_B != 0))
        if wrong_B.any():
            block = int(np.argmax(wrong_B))
            raise FrameError(
                f"topk2 block {block} of {num} has a scale of {_widen(bits_B)[block]:.3g}; "
                f"expected 0 or a number from {_SMALLEST_SCALE:.3g} to {_LARGEST_SCALE:.3g}"
            )
    wrong_B = high_bits_B < low_bits_B
    if wrong_B.any():
        block = int(np.argmax(wrong_B))
        low, high = _widen(low_bits_B)[block], _widen(high_bits_B)[block]
        raise FrameError(f"topk2 block {block} of {num} has a high scale of {high:.3g}; expected {low:.3g} or more")


def _checked_positions(places_K: Places, elements: int) -> Positions:
    """Return the positions in the span. Twelve bits cannot reach another block, but may exceed a short one."""
    positions_K = _blocks_of(places_K.size) * BLOCK_ELEMENTS + places_K
    falls_K = positions_K[1:] <= positions_K[:-1]
    if falls_K.any():
        before, after = positions_K[int(np.argmax(falls_K)) :][:2]
        raise FrameError(
            f"topk2 span of {elements} elements keeps element {after} after {before}; expected increasing order"
        )
    if elements and positions_K[-1] >= elements:
        last, end = positions_K[-1], elements - 1
        raise FrameError(f"topk2 span of {elements} elements keeps element {last}; expected 0 to {end}")
    return positions_K


def _chunks_of(bits_N: Bits) -> Iterator[Bits]:
    """Yield whole blocks in chunks, then the short block if there is one."""
    whole = bits_N.size // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    for start in range(0, whole, _CHUNK_ELEMENTS):
        yield bits_N[start : min(start + _CHUNK_ELEMENTS, whole)].reshape(-1, BLOCK_ELEMENTS)
    if whole < bits_N.size:
        yield bits_N[None, whole:]


def _select(bits_BL: Bits, kept: int) -> tuple[Positions, Bits]:
    """Return the places of each block's largest magnitudes, in increasing order, and the bits of their values."""
    magnitude_BL = bits_BL & _MAGNITUDE
    # Magnitudes are ordered like their bits: numbers, then infinity, then NaN.
    border = bits_BL.shape[1] - kept
    least_B1 = np.partition(magnitude_BL, border, axis=1)[:, border, None]
    is_kept_BL = magnitude_BL >= least_B1
    for block in np.flatnonzero(np.count_nonzero(is_kept_BL, axis=1) > kept):
        _drop_late_ties(is_kept_BL[block], magnitude_BL[block] == least_B1[block], kept)
    flat_K = np.flatnonzero(is_kept_BL)
    places_K = flat_K % bits_BL.shape[1]
    return places_K.reshape(-1, kept), bits_BL.reshape(-1)[flat_K].reshape(-1, kept)


def _drop_late_ties(is_kept_L: Flags, is_tie_L: Flags, kept: int) -> None:
    """Keep only the first that fit of the elements equal to the smallest kept one."""
    room = kept - np.count_nonzero(is_kept_L & ~is_tie_L)
    is_kept_L[np.flatnonzero(is_tie_L)[room:]] = False


def _split(kept_BK: Bits) -> tuple[Sums, Sums, Flags]:
    """Return the low and high mean of each block's magnitudes, and which magnitudes are high.

    Computed in float64, where no sum of float32 values overflows. All sums are exact unless magnitudes of a block
    differ by 2^22 or more, and then the error is far below bfloat16 rounding.
    """
    magnitude_BK = (kept_BK & _MAGNITUDE).view(np.float32).astype(np.float64)
    is_high_BK = magnitude_BK > (_sum_of(magnitude_BK) / magnitude_BK.shape[1])[:, None]
    num_high_B = np.count_nonzero(is_high_BK, axis=1)
    # The smallest number is not above the mean, so at least one is low.
    low_B = _sum_of(np.where(is_high_BK, 0.0, magnitude_BK)) / (magnitude_BK.shape[1] - num_high_B)
    high_B = _sum_of(np.where(is_high_BK, magnitude_BK, 0.0)) / np.maximum(num_high_B, 1)
    return low_B, np.maximum(low_B, high_B), is_high_BK


def _sum_of(values_BK: Sums) -> Sums:
    """Sum each row by repeatedly adding its second half to its first: a fixed order on every machine."""
    while values_BK.shape[1] > 1:
        half = values_BK.shape[1] // 2
        odd_B1 = values_BK[:, 2 * half :]
        values_BK = np.concatenate((values_BK[:, :half] + values_BK[:, half : 2 * half], odd_B1), axis=1)
    return values_BK[:, 0]


def _to_scale_bits(mean_B: Sums) -> ScaleBits:
    """Round to the nearest valid bfloat16 scale, ties to even, or to zero.

    As in `blocks.py`, scales are never subnormal, but here a small mean becomes zero if that is nearer: a scale above
    twice the mean could make the residual longer than the vector.
    """
    bits_B = mean_B.view(np.uint64)
    half = np.uint64(1) << (_CUT_BITS - np.uint64(1))
    bits_B = bits_B + (half - np.uint64(1)) + ((bits_B >> _CUT_BITS) & np.uint64(1))
    rounded_B = (bits_B >> _CUT_BITS << _CUT_BITS).view(np.float64)
    scales_B = np.clip(rounded_B, _SMALLEST_SCALE, _LARGEST_SCALE)
    scales_B[mean_B < _SMALLEST_SCALE / 2] = 0
    return (scales_B.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _widen(scale_bits_B: ScaleBits) -> Vector:
    return (scale_bits_B.astype(np.uint32) << 16).view(np.float32)


def _pack_places(places_K: Places) -> Bytes:
    """Return two places of twelve bits in three bytes, the earlier in the low bits."""
    places_P2 = np.pad(places_K, (0, places_K.size % 2)).reshape(-1, 2).astype(np.uint32)
    packed_P = (places_P2[:, 0] | places_P2[:, 1] << 12).astype("<u4")
    return np.ascontiguousarray(packed_P.view(np.uint8).reshape(-1, 4)[:, :3])


def _unpack_places(packed: Bytes) -> Places:
    """Return the places in the bytes, an even number."""
    bytes_P3 = packed.reshape(-1, 3).astype(np.uint16)
    places_P2 = np.empty((len(bytes_P3), 2), dtype=np.uint16)
    places_P2[:, 0] = bytes_P3[:, 0] | (bytes_P3[:, 1] & 0x0F) << 8
    places_P2[:, 1] = bytes_P3[:, 1] >> 4 | bytes_P3[:, 2] << 4
    return places_P2.reshape(-1)


def _pack_codes(codes_K: Bytes) -> Bytes:
    """Return four codes per byte, the earliest in the lowest bits."""
    codes_P4 = np.pad(codes_K, (0, -codes_K.size % 4)).reshape(-1, 4) << _CODE_SHIFTS
    packed: Bytes = np.bitwise_or.reduce(codes_P4, axis=1)
    return packed


def _unpack_codes(packed: Bytes) -> Bytes:
    """Return the codes in the bytes, a multiple of four."""
    codes_P4: Bytes = (packed[:, None] >> _CODE_SHIFTS) & (_HIGH | _NEGATIVE)
    return codes_P4.reshape(-1)
