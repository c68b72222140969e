"""Parts of an encoding that loops over whole spans get as views, and when such loops exist."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.codec import BlockCodec, Int4Codec, Int8Codec, is_whole
from p2p_diloco.errors import FrameError

both_codecs = pytest.mark.parametrize("codec", [Int8Codec(), Int4Codec()], ids=["int8", "int4"])


@both_codecs
def test_parts_are_scales_then_codes_and_read_only(codec: BlockCodec) -> None:
    encoded = bytearray(codec.encode(np.arange(130, dtype=np.float32)))
    scale_bits_B, packed = codec.parts(encoded, 130)
    assert scale_bits_B.tobytes() + packed.tobytes() == encoded
    assert scale_bits_B.shape == (3,)
    for part in (scale_bits_B, packed):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


@both_codecs
def test_an_encoding_of_the_wrong_size_has_no_parts(codec: BlockCodec) -> None:
    with pytest.raises(FrameError, match="span of 128 elements has"):
        codec.parts(codec.encode(np.ones(129, np.float32)), 128)


@both_codecs
def test_limits_match_what_encoders_write(codec: BlockCodec) -> None:
    largest, least_bits, most_bits = codec.loop_limits()
    assert largest == codec.largest_code
    for value, expected in ((1e-45, least_bits), (np.finfo(np.float32).max, most_bits)):
        scale_bits_B, _ = codec.parts(codec.encode(np.full(64, value, np.float32)), 64)
        assert scale_bits_B[0] == expected


def test_only_a_span_of_whole_blocks_is_whole() -> None:
    assert [elements for elements in (0, 63, 64, 100, 128) if is_whole(elements)] == [64, 128]
