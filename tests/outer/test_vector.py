"""Claims about flat float32 vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.outer.pseudo_gradient import pseudo_gradient
from p2p_diloco.outer.vector import (
    BLOCK_ELEMENTS,
    count_non_finite,
    euclidean_norm,
    is_vector,
    iterate_blocks,
    loops_for,
    read_only,
)


@settings(deadline=None)
@given(elements=st.integers(min_value=0, max_value=5 * BLOCK_ELEMENTS))
def test_blocks_hold_every_element_exactly_once_and_in_order(elements: int) -> None:
    positions = [position for block in iterate_blocks(elements) for position in range(block.start, block.stop)]
    assert positions == list(range(elements))


def test_a_vector_is_one_dimensional_float32() -> None:
    assert is_vector(np.zeros(3, dtype=np.float32))
    assert not is_vector(np.zeros((3, 1), dtype=np.float32))
    assert not is_vector(np.zeros(3, dtype=np.float64))
    assert not is_vector(np.zeros(3, dtype=np.dtype(np.float32).newbyteorder("S")))


def test_a_read_only_view_refuses_writes_and_shares_memory() -> None:
    vector_N = np.zeros(3, dtype=np.float32)
    view_N = read_only(vector_N)
    with pytest.raises(ValueError, match="read-only"):
        view_N[0] = 1.0
    assert np.shares_memory(view_N, vector_N)
    assert vector_N.flags.writeable


@pytest.mark.parametrize("position", [0, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_counted_anywhere(position: int, value: float) -> None:
    vector_N = np.ones(BLOCK_ELEMENTS + 7, dtype=np.float32)
    assert count_non_finite(vector_N) == 0
    vector_N[position] = value
    assert count_non_finite(vector_N) == 1
    assert not math.isfinite(euclidean_norm(vector_N))


def test_the_norm_is_exact_if_squares_and_sums_are() -> None:
    assert euclidean_norm(np.array([3.0, -4.0], dtype=np.float32)) == 5.0
    assert euclidean_norm(np.zeros(0, dtype=np.float32)) == 0.0
    assert euclidean_norm(np.full(4 * BLOCK_ELEMENTS, 2.0, dtype=np.float32)) == 2.0 * math.sqrt(4 * BLOCK_ELEMENTS)


def test_the_norm_of_the_largest_float32_does_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    assert euclidean_norm(np.full(4, largest, dtype=np.float32)) == pytest.approx(2.0 * largest)


def test_loops_take_only_vectors_of_one_kind_and_length() -> None:
    one_N, other_N = np.zeros(64, np.float32), np.zeros(64, np.float32)
    assert loops_for(one_N, other_N) is not None
    for wrong_N in (np.zeros(65, np.float32), np.zeros(64), np.zeros(64, ">f4"), np.zeros((64, 1), np.float32)):
        assert loops_for(one_N, wrong_N) is None
    assert loops_for(one_N[:63]) is None
    with pytest.raises(ValueError, match="could not be broadcast"):
        pseudo_gradient(one_N, np.zeros(63, np.float32), ())
