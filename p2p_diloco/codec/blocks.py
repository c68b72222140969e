"""int8 and int4: small integer codes with one scale per block of 64.

Layout, B = ceil(N / 64): B bfloat16 scales (little-endian), then the codes of all elements. A value is
`scale · code`, with codes from -largest to +largest. The product has at most 15 significant bits, so it is exact in
float32, and scales and codes give the exact norm of the decoded values.

A scale is the block's largest magnitude divided by the largest code, rounded *up*, so that nothing is clipped. Scales
are 0 or at least 2^-64 (subnormal scales would decode to different bits if a library has set the processor to flush
them to zero), and `largest · scale` is at most 2^64; only values beyond that are clipped.

Axes: N elements of a span, B blocks of a span or chunk, K elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.codes import NO_NOISE, Limits, Parts, accumulate, code_squares, decode, encode, unpack4, widened
from p2p_diloco.codec.interface import Codec, Encoded, RoundingBits, contiguous_vector, refuse_non_finite_update
from p2p_diloco.codec.vectors import (
    BLOCK,
    LARGEST,
    SMALLEST,
    Bits,
    Bytes,
    Vector,
    iterate_blocks,
    num_blocks,
    read_only,
    squared_norm_of_bfloat16,
)
from p2p_diloco.errors import FrameError
from p2p_diloco.memory.slabs import passing_bytes

_SCALE_BYTES = 2
# Number of blocks for which random bits are drawn at a time: half a megabyte.
_DRAWN_BLOCKS = 1 << 12
# Number of blocks that a mean adds up at a time, from one part after the other: 256 KiB stay in the cache.
_ADDED_BLOCKS = 1 << 10
_SMALLEST_SCALE_BITS = int(np.float32(SMALLEST).view(np.uint32)) >> 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCodec(Codec):
    """A codec of scaled integer codes. Two codes of 4 bits are in a byte, the earlier element in the low nibble.

    Operations take whole blocks; a short last block is filled up with zeros, which are encoded as zeros.

    Attributes:
        code_bits: bits per code, in two's complement.
        largest_code: codes range from -largest_code to largest_code; the lowest in two's complement is refused.
    """

    code_bits: int
    largest_code: int

    def code_bytes(self, elements: int) -> int:
        """Return the number of bytes of the codes of `elements` elements."""
        return (elements * self.code_bits + 7) // 8

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector: two bytes per block, plus the codes."""
        return _SCALE_BYTES * num_blocks(elements) + self.code_bytes(elements)

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Scale and round to codes, block by block; see `Codec.encode`."""
        vector_N = contiguous_vector(vector_N)
        whole = num_blocks(vector_N.size) * BLOCK
        encoded = np.empty(self.encoded_bytes(whole), dtype=np.uint8)
        scale_bits_B, packed = parts_of(encoded, whole)
        noise, limits = None if rounding_seed is None else RoundingBits(rounding_seed), self.loop_limits()
        for blocks in iterate_blocks(scale_bits_B.size, _DRAWN_BLOCKS):
            here, codes = _elements_of(blocks), packed[self._codes_of(blocks)]
            whole_N = _filled_up(vector_N[here], here.stop - here.start)
            noise_N = NO_NOISE if noise is None else noise.draw(whole_N.size)
            if not encode(whole_N, noise_N, limits, scale_bits_B[blocks], codes):
                refuse_non_finite_update(vector_N)
        return encoded[: self.encoded_bytes(vector_N.size)].tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Multiply codes by scales; see `Codec.decode`."""
        scale_bits_B, codes = self._whole_blocks(encoded, elements)
        whole_N = np.empty(scale_bits_B.size * BLOCK, dtype=np.float32)
        if not decode(scale_bits_B, codes, self._least, whole_N):
            self._refuse_codes(codes, elements)
        return whole_N[:elements]

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Add up piece by piece, without intermediate decoded vectors; see `Codec.add_up`."""
        parts = [self._whole_blocks(one, elements) for one in encoded]
        sum_N = np.empty(num_blocks(elements) * BLOCK, np.float32)
        for blocks in iterate_blocks(num_blocks(elements), _ADDED_BLOCKS):
            out_N, here = sum_N[_elements_of(blocks)], self._codes_of(blocks)
            is_first = True
            for (scale_bits_B, codes), share in zip(parts, shares, strict=True):
                if not accumulate(scale_bits_B[blocks], codes[here], self._least, share, is_first, out_N):
                    self._refuse_codes(codes, elements)
                is_first = False
        return sum_N[:elements]

    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        """Return the encoding of a slice; see `Codec.bytes_of`."""
        scale_bits_B, packed = parts_of(received, elements)
        scales = scale_bits_B[here.start // BLOCK : num_blocks(here.stop)]
        return scales.tobytes() + packed[self.code_bytes(here.start) : self.code_bytes(here.stop)].tobytes()

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact sum over blocks of scale² · Σ code²; see `Codec.squared_norm`."""
        scale_bits_B, codes = self._whole_blocks(encoded, elements)
        code_squares_B = np.empty(scale_bits_B.size, dtype=np.int64)
        if not code_squares(codes, self._least, code_squares_B):
            self._refuse_codes(codes, elements)
        return squared_norm_of_bfloat16(scale_bits_B, code_squares_B)

    def parts(self, encoded: Encoded, elements: int) -> Parts:
        """Return read-only views of an encoding's parts. Only the size is checked; compiled loops check the rest.

        Raises:
            FrameError: the size is wrong.
        """
        scale_bits_B, packed = parts_of(self._received(encoded, elements), elements)
        return read_only(scale_bits_B), read_only(packed)

    def empty_encoding(self, elements: int) -> tuple[memoryview, Bits, Bytes]:
        """Return memory for an encoding of whole blocks, and views of its parts, for a fused pass to write."""
        room = passing_bytes(self.encoded_bytes(elements))
        return room, *parts_of(np.frombuffer(room, dtype=np.uint8), elements)

    def loop_limits(self) -> Limits:
        """Return the limits for a compiled encoder: largest code, and the bits of the smallest and largest scale."""
        most_bits = np.uint32(largest_scale_bits(self.largest_code))
        return np.float32(self.largest_code), np.uint32(_SMALLEST_SCALE_BITS), most_bits

    @property
    def _least(self) -> np.int32:
        return np.int32(-self.largest_code)

    def _codes_of(self, blocks: slice) -> slice:
        return slice(self.code_bytes(blocks.start * BLOCK), self.code_bytes(blocks.stop * BLOCK))

    def _whole_blocks(self, encoded: Encoded, elements: int) -> Parts:
        """Return the parts of an encoding after checking its scales, with a short last block filled up."""
        scale_bits_B, packed = parts_of(self._received(encoded, elements), elements)
        largest_bits = largest_scale_bits(self.largest_code)
        # One comparison refuses negative, infinite, NaN and too large scales: as integers they are all larger.
        wrong_B = (scale_bits_B > largest_bits) | ((scale_bits_B < _SMALLEST_SCALE_BITS) & (scale_bits_B != 0))
        if wrong_B.any():
            block = int(np.argmax(wrong_B))
            raise FrameError(
                f"{self.name} block {block} of {scale_bits_B.size} has a scale of {_scale(scale_bits_B[block]):.3g}; "
                f"expected 0 or a number from {_scale(_SMALLEST_SCALE_BITS):.3g} to {_scale(largest_bits):.3g}"
            )
        spare_bits = 8 * packed.size - self.code_bits * elements
        codes = _filled_up(packed, self.code_bytes(scale_bits_B.size * BLOCK))
        if spare_bits and packed[-1] >> (8 - spare_bits):
            self._refuse_codes(codes, elements)
        return scale_bits_B, codes

    def _refuse_codes(self, codes: Bytes, elements: int) -> NoReturn:
        """Raise the error about codes that no encoder writes."""
        codes_N = codes.view(np.int8) if self.code_bits == 8 else unpack4(codes)
        if codes_N.min() < -self.largest_code:
            raise FrameError(
                f"{self.name} element {int(np.argmin(codes_N))} of {elements} has the code {codes_N.min()}; "
                f"expected {-self.largest_code} to {self.largest_code}"
            )
        raise FrameError(f"{self.name} span of {elements} elements has a code {elements + 1}; expected 0 there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Codec(BlockCodec):
    """4.25 bits per parameter: codes -7 to 7, two per byte; -8 is refused.

    An odd number of elements leaves the last high nibble zero.
    """

    name: str = "int4"
    code_bits: int = 4
    largest_code: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Codec(BlockCodec):
    """8.25 bits per parameter: codes -127 to 127, one per byte; -128 is refused."""

    name: str = "int8"
    code_bits: int = 8
    largest_code: int = 127


def is_whole(elements: int) -> bool:
    """Return whether a span consists of whole blocks."""
    return elements > 0 and elements % BLOCK == 0


@cache
def largest_scale_bits(largest_code: int) -> int:
    """Return the bits of the largest bfloat16 scale whose largest value is within the bound on updates."""
    limit = np.float32(LARGEST) / np.float32(largest_code)
    return int(limit.view(np.uint32)) >> 16


def parts_of(encoded: Bytes, elements: int) -> Parts:
    """Return views of an encoding's parts."""
    border = _SCALE_BYTES * num_blocks(elements)
    return encoded[:border].view("<u2"), encoded[border:]


def _elements_of(blocks: slice) -> slice:
    return slice(blocks.start * BLOCK, blocks.stop * BLOCK)


def _filled_up(array_N: npt.NDArray[Any], elements: int) -> npt.NDArray[Any]:
    """Return the array, with zeros behind it if it is shorter."""
    missing = elements - array_N.size
    return array_N if not missing else np.concatenate((array_N, np.zeros(missing, dtype=array_N.dtype)))


def _scale(bits: int) -> float:
    return float(widened(np.array([bits], dtype=np.uint16))[0])
