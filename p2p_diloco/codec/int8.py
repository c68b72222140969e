"""int8: one byte per parameter and a scale per block of 64, 8.25 bits per parameter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from p2p_diloco.codec.blocks import BlockCodec, Bytes, Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Codec(BlockCodec):
    """Codes -127 to 127, one per byte, two's complement; -128 is refused."""

    name: str = "int8"
    code_bits: int = 8
    largest_code: int = 127

    def code_bytes(self, elements: int) -> int:
        """Return one byte per element."""
        return elements

    def pack(self, codes_N: Bytes) -> Bytes:
        """Return the codes unchanged."""
        return codes_N

    def unpack(self, packed: Bytes) -> Codes:
        """Return the bytes as signed codes."""
        return packed.view(np.int8)
