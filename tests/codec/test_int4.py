"""Claims about half-byte codes."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.codec import Int4Codec
from p2p_diloco.errors import FrameError

pytestmark = pytest.mark.usefixtures("loops")

CODEC = Int4Codec()
SCALE_ONE = b"\x80\x3f"


def test_bytes_worked_out_by_hand() -> None:
    # Peak 7 makes the scale 1. Codes 7, -7, 2 (2.5 ties to even), -1 and the empty high nibble.
    encoded = CODEC.encode(np.array([7.0, -7.0, 2.5, -0.75, 3.0], dtype=np.float32))
    assert encoded == SCALE_ONE + bytes([0x97, 0xF2, 0x03])
    assert CODEC.decode(encoded, 5).tolist() == [7.0, -7.0, 2.0, -1.0, 3.0]
    assert CODEC.squared_norm(encoded, 5) == 49 + 49 + 4 + 1 + 9


@pytest.mark.parametrize(("elements", "size"), [(1, 3), (2, 3), (3, 4), (64, 34), (65, 37), (640, 340)])
def test_size_is_half_a_byte_per_element_and_two_per_block(elements: int, size: int) -> None:
    assert CODEC.encoded_bytes(elements) == size


@pytest.mark.parametrize(("byte", "element"), [(0x08, 2), (0x80, 3)])
def test_the_code_minus_eight_is_refused(byte: int, element: int) -> None:
    encoded = SCALE_ONE + bytes([0x77, byte])
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError) as error:
            call(encoded, 4)
        assert str(error.value) == f"int4 element {element} of 4 has the code -8; expected -7 to 7"


@pytest.mark.parametrize("nibble", [1, 7, 9, 15])
def test_the_empty_nibble_must_be_empty(nibble: int) -> None:
    encoded = SCALE_ONE + bytes([0x77, nibble << 4 | 7])
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError) as error:
            call(encoded, 3)
        assert str(error.value) == "int4 span of 3 elements has a code 4; expected 0 there"


def test_a_bad_code_in_a_later_chunk_is_located() -> None:
    elements = 2**15 + 10
    encoded = bytearray(CODEC.encode(np.ones(elements, dtype=np.float32)))
    encoded[-1] = 0x87
    with pytest.raises(FrameError, match=f"int4 element {elements - 1} of {elements} has the code -8"):
        CODEC.decode(encoded, elements)
