"""Claims about the codecs' names."""

from __future__ import annotations

import pytest

from p2p_diloco.codec.codec import CODEC_NAMES, codec_named
from p2p_diloco.errors import ConfigError


def test_every_name_finds_the_codec_that_carries_it() -> None:
    assert CODEC_NAMES == ("float32", "bfloat16", "int8", "int4", "topk2")
    for name in CODEC_NAMES:
        assert codec_named(name).name == name
        assert codec_named(name) is codec_named(name)


@pytest.mark.parametrize("name", ["", "INT4", "fp16"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        codec_named(name)
    assert str(error.value) == f"no codec is called {name!r}; known are float32, bfloat16, int8, int4, topk2"


@pytest.mark.parametrize(
    ("name", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8.25), ("int4", 4.25), ("topk2", 0.4453125)]
)
def test_bits_per_parameter_are_as_promised(name: str, bits: float) -> None:
    assert codec_named(name).encoded_bytes(1_024_000) * 8 / 1_024_000 == bits


def test_codecs_are_frozen_values() -> None:
    codec = codec_named("int4")
    with pytest.raises(AttributeError):
        codec.name = "int5"  # type: ignore[misc]
    assert hash(codec) == hash(codec_named("int4"))
