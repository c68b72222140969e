"""Claims about one-byte codes."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.codec import Int8Codec
from p2p_diloco.errors import FrameError

pytestmark = pytest.mark.usefixtures("loops")

CODEC = Int8Codec()
SCALE_ONE = b"\x80\x3f"


def test_bytes_worked_out_by_hand() -> None:
    # Peak 127 makes the scale 1; 2.5 ties to even.
    encoded = CODEC.encode(np.array([127.0, -127.0, 2.5, -0.75], dtype=np.float32))
    assert encoded == SCALE_ONE + bytes([127, 129, 2, 255])
    assert CODEC.decode(encoded, 4).tolist() == [127.0, -127.0, 2.0, -1.0]
    assert CODEC.squared_norm(encoded, 4) == 127**2 * 2 + 4 + 1


def test_every_code_survives() -> None:
    values_N = np.arange(-127, 128, dtype=np.float32)
    for start in range(0, 192, 64):
        block_N = values_N[start : start + 64].copy()
        block_N[0] = 127.0
        assert CODEC.decode(CODEC.encode(block_N), 64).tolist() == block_N.tolist()


@pytest.mark.parametrize(("elements", "size"), [(1, 3), (64, 66), (65, 69), (640, 660)])
def test_size_is_a_byte_per_element_and_two_per_block(elements: int, size: int) -> None:
    assert CODEC.encoded_bytes(elements) == size


def test_the_code_minus_128_is_refused() -> None:
    encoded = SCALE_ONE + bytes([1, 2, 128, 3])
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError) as error:
            call(encoded, 4)
        assert str(error.value) == "int8 element 2 of 4 has the code -128; expected -127 to 127"
