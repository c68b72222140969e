"""int8: one byte per parameter and a scale per block of 64, 8.25 bits per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.codec.blocks import BlockCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Codec(BlockCodec):
    """Codes -127 to 127, one per byte; -128 is refused."""

    name: str = "int8"
    code_bits: int = 8
    largest_code: int = 127
