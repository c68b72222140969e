"""Claims about the float32 codec."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import Float32Codec
from p2p_diloco.errors import FrameError

CODEC = Float32Codec()
reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=200)


floats_within_bounds = st.floats(min_value=-(2.0**64), max_value=2.0**64, width=32).filter(
    lambda value: value == 0 or abs(value) >= 2.0**-64
)


@given(values=st.lists(floats_within_bounds, max_size=80))
@reproducible
def test_bytes_are_little_endian_floats_and_lossless(values: list[float]) -> None:
    vector_N = np.array(values, dtype=np.float32)
    encoded = CODEC.encode(vector_N, rounding_seed=b"changes nothing")
    assert encoded == struct.pack(f"<{len(values)}f", *values)
    assert CODEC.decode(encoded, len(values)).tobytes() == vector_N.tobytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_frame_with_a_value_that_is_not_finite_is_refused(value: float) -> None:
    encoded = struct.pack("<3f", 1.0, value, 2.0)
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError, match="float32 span holds 1 of 3 values that are not finite, the first at elem"):
            call(encoded, 3)


def test_norm_of_three_and_four_is_twenty_five() -> None:
    assert CODEC.squared_norm(struct.pack("<2f", 3.0, -4.0), 2) == 25.0
