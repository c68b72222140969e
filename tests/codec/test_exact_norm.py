"""Claims about exact sums of squares, against rational numbers."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import squared_norm_of_bfloat16, squared_norm_of_float32

pytestmark = pytest.mark.usefixtures("loops")

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=300)
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
finite_bfloat16_bits = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7FFF < 0x7F80)


def bfloat16_value(bits: int) -> Fraction:
    return Fraction(float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0]))


@given(values=st.lists(finite_floats, max_size=60))
@reproducible
def test_norm_of_float32_is_the_rational_sum_rounded_once(values: list[float]) -> None:
    exact = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    assert squared_norm_of_float32(np.array(values, dtype=np.float32)) == float(exact)


@given(pairs=st.lists(st.tuples(finite_bfloat16_bits, st.integers(0, 2**20)), max_size=140))
@reproducible
def test_weighted_norm_of_bfloat16_is_the_rational_sum_rounded_once(pairs: list[tuple[int, int]]) -> None:
    bits_N = np.array([bits for bits, _ in pairs], dtype=np.uint16)
    weights_N = np.array([weight for _, weight in pairs], dtype=np.int64)
    squares = [bfloat16_value(bits) ** 2 for bits, _ in pairs]
    assert squared_norm_of_bfloat16(bits_N) == float(sum(squares))
    weighted = sum(square * weight for square, (_, weight) in zip(squares, pairs, strict=True))
    assert squared_norm_of_bfloat16(bits_N, weights_N) == float(weighted)


def test_a_small_value_next_to_a_large_one_is_not_lost() -> None:
    # 2^53 + 1 + 1: float64 additions one by one would give 2^53.
    values_N = np.array([2.0**26, 2.0**26, 2.0**26, 2.0**26, 1, 1, 1, 1], dtype=np.float32)
    values_N[:4] *= np.float32(2**0.5)
    exact = math.fsum(value * value for value in values_N.astype(np.float64).tolist())
    assert squared_norm_of_float32(values_N) == exact
    assert squared_norm_of_float32(np.roll(values_N, 3)) == exact


@pytest.mark.parametrize("elements", [2**14 - 1, 2**14, 2**14 + 1, 3 * 2**14 + 5])
def test_norm_across_chunks_equals_fsum(elements: int) -> None:
    draw = random.Random(elements)
    values_N = np.array([draw.gauss(0, 1) * 2.0 ** draw.randint(-60, 60) for _ in range(elements)], dtype=np.float32)
    exact = math.fsum(value * value for value in values_N.astype(np.float64).tolist())
    assert squared_norm_of_float32(values_N) == exact
    bits_N = (values_N.view(np.uint32) >> 16).astype(np.uint16)
    truncated_N = (bits_N.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert squared_norm_of_bfloat16(bits_N) == math.fsum(value * value for value in truncated_N.tolist())


def test_the_largest_weights_and_values_fit() -> None:
    bits_N = np.full(2**14, 0x7F7F, dtype=np.uint16)
    weights_N = np.full(2**14, 2**20, dtype=np.int64)
    assert squared_norm_of_bfloat16(bits_N, weights_N) == float(bfloat16_value(0x7F7F) ** 2 * 2**34)
