"""Claims about the checks that all codecs share."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.checks import (
    bytes_of_size,
    contiguous_vector,
    refuse_non_finite_frame,
    refuse_non_finite_update,
)
from p2p_diloco.errors import FrameError, NonFiniteUpdate


def test_a_contiguous_vector_is_not_copied() -> None:
    vector_N = np.ones(5, dtype=np.float32)
    assert np.shares_memory(contiguous_vector(vector_N), vector_N)
    assert contiguous_vector(vector_N[::2]).flags.c_contiguous


@pytest.mark.parametrize("received_bytes", [0, 339, 341])
def test_a_wrong_size_is_told_with_both_numbers(received_bytes: int) -> None:
    with pytest.raises(FrameError) as error:
        bytes_of_size("int4", bytes(received_bytes), 640, 340)
    assert str(error.value) == f"int4 span of 640 elements came as {received_bytes} bytes; expected 340"


def test_items_wider_than_a_byte_are_counted_as_bytes() -> None:
    words = memoryview(bytes(12)).cast("I")
    assert len(words) == 3
    assert bytes_of_size("float32", words, 3, 12).size == 12


def test_finite_vectors_pass() -> None:
    vector_N = np.array([0.0, -0.0, np.finfo(np.float32).max], dtype=np.float32)
    refuse_non_finite_update(vector_N)
    refuse_non_finite_frame("float32", vector_N)


def test_values_that_are_not_finite_are_counted_and_placed() -> None:
    vector_N = np.array([1, np.nan, 2, np.inf, -np.inf], dtype=np.float32)
    with pytest.raises(NonFiniteUpdate) as ours:
        refuse_non_finite_update(vector_N)
    assert str(ours.value) == (
        "the update to encode holds 3 of 5 values that are not finite, the first at element 1; "
        "it is left out of this round"
    )
    with pytest.raises(FrameError) as theirs:
        refuse_non_finite_frame("bfloat16", vector_N)
    assert str(theirs.value) == "bfloat16 span holds 3 of 5 values that are not finite, the first at element 1"
