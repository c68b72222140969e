"""Claims about flat float32 vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2p_diloco.codec.vectors import CACHED_ELEMENTS, count_non_finite, euclidean_norm, read_only


def test_a_read_only_view_refuses_writes_and_shares_memory() -> None:
    vector_N = np.zeros(3, dtype=np.float32)
    view_N = read_only(vector_N)
    with pytest.raises(ValueError, match="read-only"):
        view_N[0] = 1.0
    assert np.shares_memory(view_N, vector_N)
    assert vector_N.flags.writeable


@pytest.mark.parametrize("position", [0, CACHED_ELEMENTS - 1, CACHED_ELEMENTS, CACHED_ELEMENTS + 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_counted_anywhere(position: int, value: float) -> None:
    vector_N = np.ones(CACHED_ELEMENTS + 7, dtype=np.float32)
    assert count_non_finite(vector_N) == 0
    vector_N[position] = value
    assert count_non_finite(vector_N) == 1
    assert not math.isfinite(euclidean_norm(vector_N))


def test_the_norm_is_exact_if_squares_and_sums_are() -> None:
    assert euclidean_norm(np.array([3.0, -4.0], dtype=np.float32)) == 5.0
    assert euclidean_norm(np.zeros(0, dtype=np.float32)) == 0.0
    assert euclidean_norm(np.full(4 * CACHED_ELEMENTS, 2.0, dtype=np.float32)) == 2.0 * math.sqrt(4 * CACHED_ELEMENTS)


def test_the_norm_of_the_largest_float32_does_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    assert euclidean_norm(np.full(4, largest, dtype=np.float32)) == pytest.approx(2.0 * largest)
