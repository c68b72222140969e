"""Small integer codes with one scale per block of 64: the common part of int8 and int4.

Layout, B = ceil(N / 64): B bfloat16 scales (little-endian), then the codes of all elements. A value is
`scale · code`, with codes from -largest to +largest. The product has at most 15 significant bits, so it is exact in
float32, and scales and codes give the exact norm of the decoded values.

A scale is the block's largest magnitude divided by the largest code, rounded *up*, so that nothing is clipped. Scales
are 0 or at least 2^-64 (subnormal scales would decode to different bits if a library has set the processor to flush
them to zero), and `largest · scale` is at most 2^64; only values beyond that are clipped.

Axes: N elements of a span, B blocks of a span or chunk, K elements of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.checks import bytes_of_size, contiguous_vector, refuse_non_finite_update
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.codec.interface import Codec, Encoded, Vector
from p2p_diloco.codec.rounding import RoundingBits
from p2p_diloco.errors import FrameError
from p2p_diloco.kernels.bounds import LARGEST, SMALLEST
from p2p_diloco.kernels.choice import block_kernels, frozen

BLOCK_ELEMENTS = 64
_SCALE_BYTES = 2
# 128 KiB of float32: source and scratch fit into a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 15
_CHUNK_BLOCKS = _CHUNK_ELEMENTS // BLOCK_ELEMENTS
# Number of blocks for which random bits are drawn at a time: half a megabyte.
_LOOP_BLOCKS = 1 << 12
_SMALLEST_SCALE_BITS = int(np.float32(SMALLEST).view(np.uint32)) >> 16
_NO_NOISE = np.empty(0, dtype=np.uint16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# Adding 1.5 · 2^23 leaves the nearest integer (ties to even) in the lowest bits of a float32.
_TO_INTEGER = np.float32(12582912.0)

Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]
ScaleBits = npt.NDArray[np.uint16]


class BlockParts(NamedTuple):
    """The parts of an encoding: the bits of all scales, shape (B,), and the packed codes."""

    scale_bits_B: ScaleBits
    packed: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCodec(Codec):
    """A codec of scaled integer codes; subclasses define how codes become bytes.

    Attributes:
        code_bits: bits per code.
        largest_code: codes range from -largest_code to largest_code.
    """

    code_bits: int
    largest_code: int

    @abstractmethod
    def code_bytes(self, elements: int) -> int:
        """Return the number of bytes of the codes of `elements` elements."""

    @abstractmethod
    def pack(self, codes_N: Bytes) -> Bytes:
        """Return the bytes of an even number of codes in two's complement; may overwrite the input."""

    @abstractmethod
    def unpack(self, packed: Bytes) -> Codes:
        """Return the codes in the bytes, which may include -largest_code - 1."""

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector: two bytes per block, plus the codes."""
        return _SCALE_BYTES * num_blocks(elements) + self.code_bytes(elements)

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Scale and round to codes, block by block; see `Codec.encode`."""
        vector_N = contiguous_vector(vector_N)
        encoded = np.empty(self.encoded_bytes(vector_N.size), dtype=np.uint8)
        scale_bits_B, packed = parts_of(encoded, vector_N.size)
        noise = None if rounding_seed is None else RoundingBits(rounding_seed)
        begin = self._encode_whole_blocks(vector_N, scale_bits_B, packed, noise)
        scratch_BK = np.empty((min(_CHUNK_BLOCKS, scale_bits_B.size), BLOCK_ELEMENTS), dtype=np.float32)
        with np.errstate(under="ignore"):
            for start in range(begin, vector_N.size, _CHUNK_ELEMENTS):
                chunk_N = vector_N[start : start + _CHUNK_ELEMENTS]
                chunk_BK = _whole_blocks(chunk_N)
                first_block = start // BLOCK_ELEMENTS
                chunk_scales_B = scale_bits_B[first_block : first_block + len(chunk_BK)]
                out_BK = scratch_BK[: len(chunk_BK)]
                if not _find_scales(chunk_BK, self.largest_code, chunk_scales_B, out_BK):
                    refuse_non_finite_update(vector_N)
                codes_N = _round_to_codes(chunk_BK, chunk_scales_B, self.largest_code, noise, out_BK)
                first_byte = self.code_bytes(start)
                chunk_bytes = self.code_bytes(chunk_N.size)
                packed[first_byte : first_byte + chunk_bytes] = self.pack(codes_N)[:chunk_bytes]
        return encoded.tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Multiply codes by scales; see `Codec.decode`."""
        scale_bits_B, packed = self._checked(encoded, elements)
        scales_B = _widen(scale_bits_B)
        vector_N = np.empty(elements, dtype=np.float32)
        begin = self._decode_whole_blocks(scale_bits_B, packed, vector_N)
        for start in range(begin, elements, _CHUNK_ELEMENTS):
            out_N = vector_N[start : start + _CHUNK_ELEMENTS]
            out_N[:] = self._checked_codes(packed, start, elements)
            first_block = start // BLOCK_ELEMENTS
            whole = out_N.size // BLOCK_ELEMENTS
            out_BK = out_N[: whole * BLOCK_ELEMENTS].reshape(whole, BLOCK_ELEMENTS)
            out_BK *= scales_B[first_block : first_block + whole, None]
            out_N[whole * BLOCK_ELEMENTS :] *= scales_B[first_block + whole : first_block + whole + 1]
        return vector_N

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Add up chunk by chunk, without intermediate decoded vectors; see `Codec.add_up`."""
        loop, least = self._loop("accumulate"), np.int32(-self.largest_code)
        if loop is None or elements % BLOCK_ELEMENTS or not elements:
            return super(BlockCodec, self).add_up(encoded, shares, elements)
        parts = [self._checked(one, elements) for one in encoded]
        sum_N = np.empty(elements, dtype=np.float32)
        for start in range(0, elements, _CHUNK_ELEMENTS):
            out_N = sum_N[start : start + _CHUNK_ELEMENTS]
            blocks = slice(start // BLOCK_ELEMENTS, (start + out_N.size) // BLOCK_ELEMENTS)
            codes = slice(self.code_bytes(start), self.code_bytes(start + out_N.size))
            for place, ((scale_bits_B, packed), share) in enumerate(zip(parts, shares, strict=True)):
                if not loop(frozen(scale_bits_B[blocks]), frozen(packed[codes]), least, share, place == 0, out_N):
                    self.decode(encoded[place], elements)  # raises the detailed error
        return sum_N

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Decode slice by slice; see `Codec.reader`."""
        scale_bits_B, packed = self._checked(encoded, elements)

        def read(here: slice) -> Vector:
            scales = scale_bits_B[here.start // BLOCK_ELEMENTS : num_blocks(here.stop)]
            codes = packed[self.code_bytes(here.start) : self.code_bytes(here.stop)]
            return self.decode(scales.tobytes() + codes.tobytes(), here.stop - here.start)

        return read

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact sum over blocks of scale² · Σ code²; see `Codec.squared_norm`."""
        scale_bits_B, packed = self._checked(encoded, elements)
        code_squares_B = np.empty(scale_bits_B.size, dtype=np.int64)
        begin = self._square_whole_blocks(packed, elements, code_squares_B)
        for start in range(begin, elements, _CHUNK_ELEMENTS):
            codes_BK = _whole_blocks(self._checked_codes(packed, start, elements).astype(np.float32))
            first_block = start // BLOCK_ELEMENTS
            # 64 · 127² < 2^24: float32 represents every partial sum exactly, in any order.
            code_squares_B[first_block : first_block + len(codes_BK)] = np.einsum("bk,bk->b", codes_BK, codes_BK)
        return squared_norm_of_bfloat16(scale_bits_B, code_squares_B)

    def parts(self, encoded: Encoded, elements: int) -> BlockParts:
        """Return read-only views of an encoding's parts. Only the size is checked; compiled loops check the rest.

        Raises:
            FrameError: the size is wrong.
        """
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        scale_bits_B, packed = parts_of(received, elements)
        return BlockParts(frozen(scale_bits_B), frozen(packed))

    def loop_limits(self) -> tuple[np.float32, np.uint32, np.uint32]:
        """Return the limits for a compiled encoder: largest code, and the bits of the smallest and largest scale."""
        most_bits = np.uint32(largest_scale_bits(self.largest_code))
        return np.float32(self.largest_code), np.uint32(_SMALLEST_SCALE_BITS), most_bits

    # Compiled loops process whole blocks; the rest is done here, or everything if a loop found an invalid value.

    def _encode_whole_blocks(
        self, vector_N: Vector, scale_bits_B: ScaleBits, packed: Bytes, noise: RoundingBits | None
    ) -> int:
        """Encode whole blocks; return the number of elements encoded."""
        loop, blocks = self._loop("encode"), vector_N.size // BLOCK_ELEMENTS
        if loop is None or not blocks:
            return 0
        limits = self.loop_limits()
        for first in range(0, blocks, _LOOP_BLOCKS):
            last = min(first + _LOOP_BLOCKS, blocks)
            start, stop = first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS
            noise_N = noise.draw(stop - start) if noise is not None else _NO_NOISE
            bytes_here = packed[self.code_bytes(start) : self.code_bytes(stop)]
            vector_here = frozen(vector_N[start:stop])
            if not loop(vector_here, noise_N, *limits, scale_bits_B[first:last], bytes_here):
                refuse_non_finite_update(vector_N)
        return blocks * BLOCK_ELEMENTS

    def _decode_whole_blocks(self, scale_bits_B: ScaleBits, packed: Bytes, vector_N: Vector) -> int:
        """Decode whole blocks; return the number of elements decoded, 0 if a code is invalid."""
        loop, blocks = self._loop("decode"), vector_N.size // BLOCK_ELEMENTS
        if loop is None or not blocks:
            return 0
        whole = blocks * BLOCK_ELEMENTS
        codes = frozen(packed[: self.code_bytes(whole)])
        is_sound = loop(frozen(scale_bits_B[:blocks]), codes, np.int32(-self.largest_code), vector_N[:whole])
        return whole if is_sound else 0

    def _square_whole_blocks(self, packed: Bytes, elements: int, code_squares_B: npt.NDArray[np.int64]) -> int:
        """Sum the squared codes of whole blocks; return the number of elements, or 0 if a code is invalid."""
        loop, blocks = self._loop("code_squares"), elements // BLOCK_ELEMENTS
        if loop is None or not blocks:
            return 0
        whole = blocks * BLOCK_ELEMENTS
        codes = frozen(packed[: self.code_bytes(whole)])
        return whole if loop(codes, np.int32(-self.largest_code), code_squares_B[:blocks]) else 0

    def _loop(self, name: str) -> Callable[..., bool] | None:
        """Return the compiled loop of that name for these codes, or None."""
        kernels = block_kernels()
        return None if kernels is None else getattr(kernels, f"{name}{self.code_bits}", None)

    def _checked(self, encoded: Encoded, elements: int) -> BlockParts:
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        scale_bits_B, packed = parts_of(received, elements)
        largest_bits = largest_scale_bits(self.largest_code)
        # One comparison refuses negative, infinite, NaN and too large scales: as integers they are all larger.
        wrong_B = (scale_bits_B > largest_bits) | ((scale_bits_B < _SMALLEST_SCALE_BITS) & (scale_bits_B != 0))
        if wrong_B.any():
            block = int(np.argmax(wrong_B))
            raise FrameError(
                f"{self.name} block {block} of {scale_bits_B.size} has a scale of {_widen(scale_bits_B)[block]:.3g}; "
                f"expected 0 or a number from {_scale(_SMALLEST_SCALE_BITS):.3g} to {_scale(largest_bits):.3g}"
            )
        return BlockParts(scale_bits_B, packed)

    def _checked_codes(self, packed: Bytes, start: int, elements: int) -> Codes:
        """Return the codes of the chunk that begins at element `start`."""
        chunk_elements = min(_CHUNK_ELEMENTS, elements - start)
        first_byte = self.code_bytes(start)
        codes_N = self.unpack(packed[first_byte : first_byte + self.code_bytes(chunk_elements)])
        if codes_N.min() < -self.largest_code:
            element = start + int(np.argmin(codes_N))
            raise FrameError(
                f"{self.name} element {element} of {elements} has the code {codes_N.min()}; "
                f"expected {-self.largest_code} to {self.largest_code}"
            )
        if codes_N[chunk_elements:].any():
            raise FrameError(f"{self.name} span of {elements} elements has a code {elements + 1}; expected 0 there")
        return codes_N[:chunk_elements]


def num_blocks(elements: int) -> int:
    """Return the number of blocks; the last one may be short."""
    return -(-elements // BLOCK_ELEMENTS)


@cache
def largest_scale_bits(largest_code: int) -> int:
    """Return the bits of the largest bfloat16 scale whose largest value is within the bound on updates."""
    limit = np.float32(LARGEST) / np.float32(largest_code)
    return int(limit.view(np.uint32)) >> 16


def parts_of(encoded: Bytes, elements: int) -> BlockParts:
    """Return views of an encoding's parts."""
    border = _SCALE_BYTES * num_blocks(elements)
    return BlockParts(encoded[:border].view("<u2"), encoded[border:])


def _whole_blocks(chunk_N: Vector) -> Vector:
    """Return the chunk as rows of blocks; a short last block is padded with zeros, which encode to zeros."""
    missing = -chunk_N.size % BLOCK_ELEMENTS
    if missing:
        chunk_N = np.concatenate((chunk_N, np.zeros(missing, dtype=np.float32)))
    return chunk_N.reshape(-1, BLOCK_ELEMENTS)


def _find_scales(chunk_BK: Vector, largest_code: int, scale_bits_B: ScaleBits, scratch_BK: Vector) -> bool:
    """Write the blocks' scales; return False if a value is not finite."""
    magnitude_bits_BK = np.bitwise_and(chunk_BK.view(np.uint32), _MAGNITUDE, out=scratch_BK.view(np.uint32))
    # Magnitudes are ordered like their bits: numbers, then infinity, then NaN.
    peak_bits_B = np.maximum.reduce(magnitude_bits_BK, axis=1)
    if peak_bits_B.max() >= _INFINITY:
        return False
    quotient_B = peak_bits_B.view(np.float32) / np.float32(largest_code)
    rounded_up_B = (quotient_B.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    np.clip(rounded_up_B, _SMALLEST_SCALE_BITS, largest_scale_bits(largest_code), out=rounded_up_B)
    rounded_up_B[peak_bits_B == 0] = 0
    scale_bits_B[:] = rounded_up_B
    return True


def _round_to_codes(
    chunk_BK: Vector, scale_bits_B: ScaleBits, largest_code: int, noise: RoundingBits | None, scratch_BK: Vector
) -> Bytes:
    """Return the codes of whole blocks in two's complement.

    The quotient is value · (1 / scale), with two float32 roundings. It is clipped (rounding may make it exceed the
    largest code) and then rounded.
    """
    scales_B = _widen(scale_bits_B)
    inverse_B = np.divide(np.float32(1), scales_B, out=np.zeros_like(scales_B), where=scales_B > 0)
    np.multiply(chunk_BK, inverse_B[:, None], out=scratch_BK)
    np.clip(scratch_BK, -largest_code, largest_code, out=scratch_BK)
    if noise is not None:
        # Nearest rounding after adding (r + ½) / 2^16 - ½, which is strictly between -½ and ½: zeros stay zeros.
        offset_N = noise.draw(scratch_BK.size).astype(np.float32)
        offset_N *= np.float32(2**-16)
        offset_N += np.float32(2**-17 - 0.5)
        scratch_BK += offset_N.reshape(scratch_BK.shape)
    scratch_BK += _TO_INTEGER
    return scratch_BK.view(np.uint32).ravel().astype(np.uint8)


def _widen(scale_bits_B: ScaleBits) -> Vector:
    return (scale_bits_B.astype(np.uint32) << 16).view(np.float32)


def _scale(bits: int) -> float:
    return float(_widen(np.array([bits], dtype=np.uint16))[0])
