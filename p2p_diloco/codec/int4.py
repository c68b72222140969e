"""int4: half a byte per parameter and a scale per block of 64, 4.25 bits per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.codec.blocks import BlockCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Codec(BlockCodec):
    """Codes -7 to 7, two per byte; -8 is refused. An odd number of elements leaves the last high nibble zero."""

    name: str = "int4"
    code_bits: int = 4
    largest_code: int = 7
