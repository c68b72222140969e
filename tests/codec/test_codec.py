"""Claims about the codecs' names."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.codec import CODEC_NAMES, codec_named
from p2p_diloco.errors import ConfigError, FrameError


def test_every_name_finds_its_codec() -> None:
    assert CODEC_NAMES == ("float32", "bfloat16", "int8", "int4")
    for name in CODEC_NAMES:
        assert codec_named(name).name == name
        assert codec_named(name) is codec_named(name)


@pytest.mark.parametrize("name", ["", "INT4", "fp16"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        codec_named(name)
    assert str(error.value) == f"unknown codec {name!r}; expected one of float32, bfloat16, int8, int4"


@pytest.mark.parametrize(("name", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8.25), ("int4", 4.25)])
def test_bits_per_parameter_are_as_documented(name: str, bits: float) -> None:
    assert codec_named(name).encoded_bytes(1_024_000) * 8 / 1_024_000 == bits


def test_codecs_are_frozen_values() -> None:
    codec = codec_named("int4")
    with pytest.raises(AttributeError):
        codec.name = "int5"  # type: ignore[misc]
    assert hash(codec) == hash(codec_named("int4"))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("elements", [0, 5, 64, 4096, 40_960])
def test_adding_up_gives_the_bits_of_decoding_and_averaging(name: str, elements: int) -> None:
    codec, rng = codec_named(name), np.random.default_rng(elements)
    encoded = [codec.encode(rng.standard_normal(elements, dtype=np.float32)) for _ in range(3)]
    shares = [np.float32(share) for share in (0.5, 0.2, 0.3)]
    expected_N = codec.decode(encoded[0], elements) * shares[0]
    for one, share in zip(encoded[1:], shares[1:], strict=True):
        expected_N = expected_N + codec.decode(one, elements) * share
    sum_N = codec.add_up(encoded, shares, elements)
    assert np.array_equal(sum_N.view(np.uint32), expected_N.view(np.uint32))
    assert np.array_equal(
        codec.add_up(encoded[:1], shares[:1], elements), codec.decode(encoded[0], elements) * shares[0]
    )


@pytest.mark.usefixtures("loops")
def test_a_code_that_no_encoder_writes_is_not_added_up() -> None:
    codec = codec_named("int4")
    wrong = bytearray(codec.encode(np.ones(128, np.float32)))
    wrong[-1] = 0x80
    with pytest.raises(FrameError, match="element 127 of 128 has the code -8"):
        codec.add_up([codec.encode(np.ones(128, np.float32)), wrong], [np.float32(0.5)] * 2, 128)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("elements", [1, 64, 100, 4096, 3 * 4096 + 77])
def test_slices_decode_like_the_whole(name: str, elements: int) -> None:
    codec = codec_named(name)
    encoded = codec.encode(np.random.default_rng(elements).standard_normal(elements).astype(np.float32))
    read, decoded_N = codec.reader(encoded, elements), codec.decode(encoded, elements)
    for start in range(0, elements, 4096):
        here = slice(start, min(start + 4096, elements))
        assert np.array_equal(read(here), decoded_N[here])


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_reader_refuses_what_the_decoder_refuses(name: str) -> None:
    codec = codec_named(name)
    with pytest.raises(FrameError):
        codec.reader(bytes(codec.encoded_bytes(4096) + 1), 4096)
    with pytest.raises(FrameError):
        codec.reader(b"\xff" * codec.encoded_bytes(4096), 4096)(slice(0, 4096))
