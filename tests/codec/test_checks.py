"""Claims about the checks that all codecs share."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.codec import (
    codec_named,
    contiguous_vector,
    refuse_frame_out_of_bounds,
    refuse_non_finite_update,
    within_bounds,
)
from p2p_diloco.errors import FrameError, NonFiniteUpdate


def test_a_contiguous_vector_is_not_copied() -> None:
    vector_N = np.ones(5, dtype=np.float32)
    assert np.shares_memory(contiguous_vector(vector_N), vector_N)
    assert contiguous_vector(vector_N[::2]).flags.c_contiguous


@pytest.mark.parametrize("received_bytes", [0, 339, 341])
def test_a_wrong_size_is_reported_with_both_numbers(received_bytes: int) -> None:
    with pytest.raises(FrameError) as error:
        codec_named("int4").decode(bytes(received_bytes), 640)
    assert str(error.value) == f"int4 span of 640 elements has {received_bytes} bytes; expected 340"


def test_items_wider_than_a_byte_are_counted_as_bytes() -> None:
    words = memoryview(bytes(12)).cast("I")
    assert len(words) == 3
    assert codec_named("float32").decode(words, 3).tolist() == [0.0] * 3


def test_finite_vectors_pass() -> None:
    vector_N = np.array([0.0, -0.0, 2.0**64, -(2.0**-64)], dtype=np.float32)
    refuse_non_finite_update(vector_N)
    refuse_frame_out_of_bounds("float32", vector_N)
    assert within_bounds(vector_N) is vector_N


def test_values_out_of_bounds_are_counted_and_the_first_is_named() -> None:
    vector_N = np.array([1, 2.0**-65, 3e38], dtype=np.float32)
    with pytest.raises(FrameError) as theirs:
        refuse_frame_out_of_bounds("float32", vector_N)
    assert str(theirs.value) == (
        "float32 span holds 2 of 3 values out of bounds, the first at element 1 (2.71e-20); "
        "expected 0 or a magnitude from 5.42e-20 to 1.84e+19"
    )
    refuse_frame_out_of_bounds("float32", within_bounds(vector_N))
    assert within_bounds(vector_N).tolist() == [1.0, 0.0, 2.0**64]


def test_values_that_are_not_finite_are_counted_and_located() -> None:
    vector_N = np.array([1, np.nan, 2, np.inf, -np.inf], dtype=np.float32)
    with pytest.raises(NonFiniteUpdate) as ours:
        refuse_non_finite_update(vector_N)
    assert str(ours.value) == (
        "the update to encode holds 3 of 5 values that are not finite, the first at element 1; "
        "it is skipped in this round"
    )
    with pytest.raises(FrameError) as theirs:
        refuse_frame_out_of_bounds("bfloat16", vector_N)
    assert str(theirs.value) == "bfloat16 span holds 3 of 5 values that are not finite, the first at element 1"
