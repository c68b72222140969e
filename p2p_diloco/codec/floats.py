"""float32 and bfloat16, its upper half, within the bounds of all codecs: four and two bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.checks import (
    bytes_of_size,
    contiguous_vector,
    refuse_frame_out_of_bounds,
    refuse_non_finite_update,
    within_bounds,
)
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16, squared_norm_of_float32
from p2p_diloco.codec.interface import Codec, Encoded, Vector
from p2p_diloco.codec.rounding import RoundingBits

# 128 KiB of float32: source and scratch fit into a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Codec(Codec):
    """Little-endian IEEE 754 single precision. Lossless, so a rounding seed has no effect."""

    name: str = "float32"

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector: 4 bytes per element."""
        return 4 * elements

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Return the values' bytes; see `Codec.encode`."""
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        return within_bounds(vector_N).astype("<f4", copy=False).tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Return the encoded values, bit for bit; see `Codec.decode`."""
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        vector_N = received.view("<f4").astype(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Read slice by slice; see `Codec.reader`."""
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        return lambda here: self.decode(received[4 * here.start : 4 * here.stop].tobytes(), here.stop - here.start)

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact squared norm; see `Codec.squared_norm`."""
        return squared_norm_of_float32(self.decode(encoded, elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bfloat16Codec(Codec):
    """Little-endian bfloat16, eight significant bits.

    Both bounds on magnitudes are powers of two, so rounding never crosses them.
    """

    name: str = "bfloat16"

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector: 2 bytes per element."""
        return 2 * elements

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Round to eight significant bits; see `Codec.encode`.

        Adding 16 random bits below the cut makes stochastic rounding exactly unbiased.
        """
        vector_N = contiguous_vector(vector_N)
        refuse_non_finite_update(vector_N)
        bits_N = within_bounds(vector_N).view(np.uint32)
        noise = None if rounding_seed is None else RoundingBits(rounding_seed)
        encoded_N = np.empty(vector_N.size, dtype="<u2")
        for start in range(0, vector_N.size, _CHUNK_ELEMENTS):
            chunk = slice(start, start + _CHUNK_ELEMENTS)
            encoded_N[chunk] = _round_off(bits_N[chunk], noise)
        return encoded_N.tobytes()

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Widen to float32, which is exact; see `Codec.decode`."""
        bits_N = self._received_bits(encoded, elements)
        widened_N = bits_N.astype(np.uint32)
        widened_N <<= 16
        vector_N = widened_N.view(np.float32)
        refuse_frame_out_of_bounds(self.name, vector_N)
        return vector_N

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Read slice by slice; see `Codec.reader`."""
        received = bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements))
        return lambda here: self.decode(received[2 * here.start : 2 * here.stop].tobytes(), here.stop - here.start)

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact squared norm; see `Codec.squared_norm`."""
        self.decode(encoded, elements)
        return squared_norm_of_bfloat16(self._received_bits(encoded, elements))

    def _received_bits(self, encoded: Encoded, elements: int) -> npt.NDArray[np.uint16]:
        return bytes_of_size(self.name, encoded, elements, self.encoded_bytes(elements)).view("<u2")


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
