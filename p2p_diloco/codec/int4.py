"""int4: half a byte per parameter and a scale per block of 64, 4.25 bits per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from p2p_diloco.codec.blocks import BLOCK_ELEMENTS, BlockCodec, Bytes, Codes
from p2p_diloco.kernels.choice import span_kernels

_LOW_NIBBLES = np.uint16(0x0F0F)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Codec(BlockCodec):
    """Codes -7 to 7, two per byte, the earlier element in the low nibble, two's complement; -8 is refused.

    An odd number of elements leaves the last high nibble zero.
    """

    name: str = "int4"
    code_bits: int = 4
    largest_code: int = 7

    def code_bytes(self, elements: int) -> int:
        """Return half a byte per element, rounded up."""
        return (elements + 1) // 2

    def pack(self, codes_N: Bytes) -> Bytes:
        """Return two codes per byte."""
        # One 16-bit lane holds a pair: the shift moves the second code next to the first.
        pairs = codes_N.view("<u2")
        pairs &= _LOW_NIBBLES
        pairs |= pairs >> 4
        return pairs.astype(np.uint8)

    def unpack(self, packed: Bytes) -> Codes:
        """Return the signed codes of all nibbles, an even number."""
        pairs = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= _LOW_NIBBLES
        nibbles_N = pairs.view(np.uint8)
        # Flipping bit 3 and subtracting 8 extends the sign.
        nibbles_N ^= 8
        nibbles_N -= 8
        return nibbles_N.view(np.int8)

    def span_loops(self, elements: int) -> ModuleType | None:
        """Return the fused loops for whole spans; None without them, or if the span has a partial block."""
        return span_kernels() if elements and elements % BLOCK_ELEMENTS == 0 else None
