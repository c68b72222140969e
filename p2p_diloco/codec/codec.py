"""The codecs by name, as used in manifests."""

from __future__ import annotations

from p2p_diloco.codec.blocks import Int4Codec, Int8Codec
from p2p_diloco.codec.floats import Bfloat16Codec, Float32Codec
from p2p_diloco.codec.interface import Codec
from p2p_diloco.errors import ConfigError

__all__ = ["CODEC_NAMES", "ROW_MEAN_CODEC", "Codec", "codec_named"]

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
