"""float32 without compression, within the bounds of all codecs: four bytes per parameter, lossless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_diloco.codec.checks import (
    bytes_of_size,
    contiguous_vector,
    refuse_frame_out_of_bounds,
    refuse_non_finite_update,
    within_bounds,
)
from p2p_diloco.codec.exact_norm import squared_norm_of_float32
from p2p_diloco.codec.interface import Codec, Encoded, Vector


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
