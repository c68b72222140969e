"""The codecs by name, as used in manifests; and float32 and bfloat16, its upper half: four and two bytes per parameter.

All are within the bounds of `vectors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.blocks import Int4Codec, Int8Codec
from p2p_diloco.codec.interface import (
    Codec,
    Encoded,
    RoundingBits,
    contiguous_vector,
    refuse_frame_out_of_bounds,
    refuse_non_finite_update,
    within_bounds,
)
from p2p_diloco.codec.vectors import (
    Bits,
    Bytes,
    Vector,
    iterate_blocks,
    squared_norm_of_bfloat16,
    squared_norm_of_float32,
)
from p2p_diloco.errors import ConfigError

__all__ = ["CODEC_NAMES", "ROW_MEAN_CODEC", "Codec", "codec_named"]

# 128 KiB of float32: source and scratch fit into a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatCodec(Codec):
    """A codec of one number of fixed size for each element.

    Attributes:
        element_bytes: size of a number.
    """

    element_bytes: int

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector."""
        return self.element_bytes * elements

    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        """Return the encoding of a slice; see `Codec.bytes_of`."""
        return received[self.element_bytes * here.start : self.element_bytes * here.stop].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Codec(FloatCodec):
    """Little-endian IEEE 754 single precision. Lossless, so a rounding seed has no effect."""

    name: str = "float32"
    element_bytes: int = 4

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Return the values' bytes; see `Codec.encode`."""
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        return within_bounds(vector_N).astype("<f4", copy=False).tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Return the encoded values, bit for bit; see `Codec.decode`."""
        vector_N = self._received(encoded, elements).view("<f4").astype(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact squared norm; see `Codec.squared_norm`."""
        return squared_norm_of_float32(self.decode(encoded, elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bfloat16Codec(FloatCodec):
    """Little-endian bfloat16, eight significant bits.

    Both bounds on magnitudes are powers of two, so rounding never crosses them.
    """

    name: str = "bfloat16"
    element_bytes: int = 2

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Round to eight significant bits; see `Codec.encode`.

        Adding 16 random bits below the cut makes stochastic rounding exactly unbiased.
        """
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        bits_N = within_bounds(vector_N).view(np.uint32)
        noise = None if rounding_seed is None else RoundingBits(rounding_seed)
        encoded_N = np.empty(vector_N.size, dtype="<u2")
        for chunk in iterate_blocks(vector_N.size, _CHUNK_ELEMENTS):
            encoded_N[chunk] = _round_off(bits_N[chunk], noise)
        return encoded_N.tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Widen to float32, which is exact; see `Codec.decode`."""
        widened_N = self._received_bits(encoded, elements).astype(np.uint32)
        widened_N <<= 16
        vector_N = widened_N.view(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact squared norm; see `Codec.squared_norm`."""
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
"""Codec names for manifests, from the widest to the narrowest."""
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
