"""The codecs: vectors to bytes and back, with exact sizes and exact norms; and their names in manifests.

A codec is stateless. Peers that encode the same vector with the same seed get the same bytes, and peers that decode the
same bytes get the same float32 values, bit for bit: everything in this package is integer arithmetic, or single float
operations that IEEE 754 defines completely (no sums whose order a library could choose).

**int8 and int4** are small integer codes with one scale per block of 64. Layout, B = ceil(N / 64): B bfloat16 scales
(little-endian), then the codes of all elements. A value is `scale · code`, with codes from -largest to +largest. The
product has at most 15 significant bits, so it is exact in float32, and scales and codes give the exact norm of the
decoded values. A scale is the block's largest magnitude divided by the largest code, rounded *up*, so that nothing is
clipped. Scales are 0 or at least 2^-64 (subnormal scales would decode to different bits if a library has set the
processor to flush them to zero), and `largest · scale` is at most 2^64; only values beyond that are clipped.

**float32 and bfloat16**, its upper half, take four and two bytes per parameter, within the bounds of `vectors.py`.

Axes: N elements of a span, B blocks of a span or chunk, K elements of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.codes import NO_NOISE, Limits, Parts, accumulate, code_squares, decode, encode, unpack4, widened
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
    squared_norm_of_float32,
)
from p2p_diloco.errors import ConfigError, FrameError, NonFiniteUpdate
from p2p_diloco.ids import sha256
from p2p_diloco.memory.slabs import passing_bytes

Encoded: TypeAlias = bytes | bytearray | memoryview
"""An encoded span; any contiguous buffer of bytes."""

_ROUNDING_DOMAIN = b"p2p-diloco stochastic rounding v1\0"
_LANES_PER_WORD = 4
_SCALE_BYTES = 2
# Number of blocks for which random bits are drawn at a time: half a megabyte.
_DRAWN_BLOCKS = 1 << 12
# Number of blocks that a mean adds up at a time, from one part after the other: 256 KiB stay in the cache.
_ADDED_BLOCKS = 1 << 10
_SMALLEST_SCALE_BITS = int(np.float32(SMALLEST).view(np.uint32)) >> 16
# 128 KiB of float32: source and scratch fit into a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(ABC):
    """Turns a span's vector into bytes and back. Any number of elements can be encoded; the last block may be short.

    Attributes:
        name: name in manifests.
    """

    name: str

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector, which depends only on the number of elements."""

    @abstractmethod
    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Encode a vector.

        Too small values become 0 and too large ones are clipped: see `vectors.py`.

        Args:
            vector_N: float32, shape (N,). Not changed.
            rounding_seed: None rounds to nearest, ties to even. With a seed, rounding is stochastic: a value between
                two codes becomes the upper one with a probability equal to its distance from the lower one, so that
                errors are zero on average. The same vector and seed give the same bytes (see `RoundingBits`).
        Returns:
            Exactly `encoded_bytes(N)` bytes for `decode`.
        Raises:
            NonFiniteUpdate: `vector_N` holds a NaN or an infinity.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Decode bytes from a peer; all values of the result are within the bounds of `vectors.py`.

        Args:
            encoded: untrusted bytes. Not changed, not kept.
            elements: number of elements of the span, from the manifest, never from the peer.
        Returns:
            float32, shape (elements,), freshly allocated.
        Raises:
            FrameError: the size is wrong, a value is not finite or out of bounds, or no encoder writes such a scale or
                code.
        """

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Return a function that decodes a slice of the elements; slices begin and end at blocks, or at the end.

        Raises:
            FrameError: as for `decode`; a wrong size here, anything else when the invalid part is read.
        """
        received = self._received(encoded, elements)
        return lambda here: self.decode(self.bytes_of(received, elements, here), here.stop - here.start)

    @abstractmethod
    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        """Return the encoding of a slice of the elements, which begins and ends at blocks, or at the end."""

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Return Σ share · decoded values, in order.

        Multiply and add round separately, element by element: the result has the same bits as decoding all and then
        averaging.

        Args:
            encoded: at least one; each as in `decode`.
            shares: one for each.
        Returns:
            float32, shape (elements,), freshly allocated; not finite where a sum overflows.
        Raises:
            FrameError: as for `decode`.
        """
        first, *others = zip(encoded, shares, strict=True)
        sum_N = self.decode(first[0], elements)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(sum_N, first[1], out=sum_N)
            for one, share in others:
                addend_N = self.decode(one, elements)
                np.multiply(addend_N, share, out=addend_N)
                np.add(sum_N, addend_N, out=sum_N)
        return sum_N

    @abstractmethod
    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the squared 2-norm of the decoded values.

        It is the exact sum of the exact squares, rounded to float64 once: equal on all machines, and equal to
        `math.fsum` over the squares.

        Raises:
            FrameError: as for `decode`.
        """

    def norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact norm of the decoded values; errors as for `decode`."""
        return math.sqrt(self.squared_norm(encoded, elements))

    def _received(self, encoded: Encoded, elements: int) -> Bytes:
        """View bytes from a peer as an array.

        Raises:
            FrameError: there are more or fewer bytes than expected.
        """
        received_bytes, expected_bytes = memoryview(encoded).nbytes, self.encoded_bytes(elements)
        if received_bytes != expected_bytes:
            raise FrameError(
                f"{self.name} span of {elements} elements has {received_bytes} bytes; expected {expected_bytes}"
            )
        return np.frombuffer(encoded, dtype=np.uint8)


class RoundingBits:
    """A stream of 16 random bits per element, in the order of the elements; reproducible from a seed.

    The bits are those of Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key =
    the first 16 bytes of SHA-256(domain + seed) as two little-endian words, counter 1, 2, 3, …; element i uses bits
    16 (i mod 4) to 16 (i mod 4) + 15 of word i // 4. Only raw words are used: NumPy guarantees that this stream stays
    the same, but not its distributions. `tests/codec/test_rounding.py` has the same in plain Python.
    """

    __slots__ = ("_philox",)

    def __init__(self, seed: bytes) -> None:
        key = np.frombuffer(sha256(_ROUNDING_DOMAIN, seed)[:16], dtype="<u8").astype(np.uint64)
        self._philox = np.random.Philox(key=key)

    def draw(self, elements: int) -> Bits:
        """Return the bits of the next elements; all draws except the last must be multiples of four elements."""
        words = self._philox.random_raw(-(-elements // _LANES_PER_WORD))
        lanes_N: Bits = words.astype("<u8", copy=False).view("<u2")[:elements]
        return lanes_N


def contiguous_vector(vector_N: Vector) -> Vector:
    """Return one of our own vectors as a contiguous array; a wrong type or shape is our own bug."""
    assert vector_N.dtype == np.float32, f"codecs take float32, not {vector_N.dtype}"
    assert vector_N.ndim == 1, f"codecs take flat vectors, not shape {vector_N.shape}"
    return np.ascontiguousarray(vector_N)


def refuse_non_finite_update(vector_N: Vector) -> None:
    """Raise NonFiniteUpdate if one of our own vectors holds a NaN or an infinity."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise NonFiniteUpdate(f"the update to encode holds {count_text}; it is skipped in this round")


def within_bounds(vector_N: Vector) -> Vector:
    """Return finite values within the bounds: too small ones become zero, too large ones are clipped.

    Returns the same vector if nothing is out of bounds.
    """
    magnitude_N = np.abs(vector_N)
    if not _is_out_of_bounds(magnitude_N).any():
        return vector_N
    return np.where(magnitude_N < SMALLEST, np.float32(0), np.clip(vector_N, np.float32(-LARGEST), np.float32(LARGEST)))


def refuse_frame_out_of_bounds(name: str, vector_N: Vector) -> None:
    """Raise FrameError if a peer's vector holds a NaN, an infinity, or a value that no encoder writes."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise FrameError(f"{name} span holds {count_text}")
    wrong_N = _is_out_of_bounds(np.abs(vector_N))
    if wrong_N.any():
        element = int(np.argmax(wrong_N))
        raise FrameError(
            f"{name} span holds {int(np.count_nonzero(wrong_N))} of {vector_N.size} values out of bounds, the first at "
            f"element {element} ({vector_N[element]:.3g}); expected 0 or a magnitude from {SMALLEST:.3g} to "
            f"{LARGEST:.3g}"
        )


def _is_out_of_bounds(magnitude_N: Vector) -> npt.NDArray[np.bool_]:
    wrong_N: npt.NDArray[np.bool_] = (magnitude_N > LARGEST) | ((magnitude_N < SMALLEST) & (magnitude_N != 0))
    return wrong_N


def _non_finite_text(vector_N: Vector) -> str:
    finite_N = np.isfinite(vector_N)
    if finite_N.all():
        return ""
    count = vector_N.size - int(np.count_nonzero(finite_N))
    return f"{count} of {vector_N.size} values that are not finite, the first at element {int(np.argmin(finite_N))}"


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
        return _SCALE_BYTES * num_blocks(elements) + self.code_bytes(elements)

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
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
        scale_bits_B, codes = self._whole_blocks(encoded, elements)
        whole_N = np.empty(scale_bits_B.size * BLOCK, dtype=np.float32)
        if not decode(scale_bits_B, codes, self.least_code, whole_N):
            self._refuse_codes(codes, elements)
        return whole_N[:elements]

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Add up piece by piece, without intermediate decoded vectors."""
        parts = [self._whole_blocks(one, elements) for one in encoded]
        sum_N = np.empty(num_blocks(elements) * BLOCK, np.float32)
        for blocks in iterate_blocks(num_blocks(elements), _ADDED_BLOCKS):
            out_N, here = sum_N[_elements_of(blocks)], self._codes_of(blocks)
            is_first = True
            for (scale_bits_B, codes), share in zip(parts, shares, strict=True):
                if not accumulate(scale_bits_B[blocks], codes[here], self.least_code, share, is_first, out_N):
                    self._refuse_codes(codes, elements)
                is_first = False
        return sum_N[:elements]

    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        scale_bits_B, packed = parts_of(received, elements)
        scales = scale_bits_B[here.start // BLOCK : num_blocks(here.stop)]
        return scales.tobytes() + packed[self.code_bytes(here.start) : self.code_bytes(here.stop)].tobytes()

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact sum over blocks of scale² · Σ code²."""
        scale_bits_B, codes = self._whole_blocks(encoded, elements)
        code_squares_B = np.empty(scale_bits_B.size, dtype=np.int64)
        if not code_squares(codes, self.least_code, code_squares_B):
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
    def least_code(self) -> np.int32:
        """The lowest valid code."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatCodec(Codec):
    """A codec of one number of fixed size for each element.

    Attributes:
        element_bytes: size of a number.
    """

    element_bytes: int

    def encoded_bytes(self, elements: int) -> int:
        return self.element_bytes * elements

    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        return received[self.element_bytes * here.start : self.element_bytes * here.stop].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Codec(FloatCodec):
    """Little-endian IEEE 754 single precision. Lossless, so a rounding seed has no effect."""

    name: str = "float32"
    element_bytes: int = 4

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        return within_bounds(vector_N).astype("<f4", copy=False).tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        vector_N = self._received(encoded, elements).view("<f4").astype(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        return squared_norm_of_float32(self.decode(encoded, elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bfloat16Codec(FloatCodec):
    """Little-endian bfloat16, eight significant bits.

    Both bounds on magnitudes are powers of two, so rounding never crosses them.
    """

    name: str = "bfloat16"
    element_bytes: int = 2

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Encode; adding 16 random bits below the cut makes stochastic rounding exactly unbiased."""
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        bits_N = within_bounds(vector_N).view(np.uint32)
        noise = None if rounding_seed is None else RoundingBits(rounding_seed)
        encoded_N = np.empty(vector_N.size, dtype="<u2")
        for chunk in iterate_blocks(vector_N.size, _CHUNK_ELEMENTS):
            encoded_N[chunk] = _round_off(bits_N[chunk], noise)
        return encoded_N.tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Widen to float32, which is exact."""
        widened_N = self._received_bits(encoded, elements).astype(np.uint32)
        widened_N <<= 16
        vector_N = widened_N.view(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        self.decode(encoded, elements)
        return squared_norm_of_bfloat16(self._received_bits(encoded, elements))

    def _received_bits(self, encoded: Encoded, elements: int) -> Bits:
        return self._received(encoded, elements).view("<u2")


def _round_off(bits_N: npt.NDArray[np.uint32], noise: RoundingBits | None) -> npt.NDArray[np.uint16]:
    """Truncate to the upper halves after adding half a unit (ties to even) or random bits."""
    rounded_N = bits_N >> 16
    if noise is None:
        rounded_N &= 1
        rounded_N += 0x7FFF
    else:
        rounded_N[:] = noise.draw(bits_N.size)
    rounded_N += bits_N
    rounded_N >>= 16
    return rounded_N.astype(np.uint16)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32Codec(), Bfloat16Codec(), Int8Codec(), Int4Codec())}

CODEC_NAMES = tuple(_CODECS)
"""Codec names, from the widest to the narrowest; `CodecName` in `config/manifest.py` lists the same."""
ROW_MEAN_CODEC = "int8"
"""Codec of the mean of a row, from its reducer to the owner of the span: wide, because the entry is rounded again."""


def codec_named(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; expected one of {', '.join(CODEC_NAMES)}") from None
