"""Claims about the weighted mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2p_diloco.codec.vectors import CACHED_ELEMENTS, Vector
from p2p_diloco.errors import NonFiniteUpdate, RoundError
from simulator.maths import weighted_mean

VECTOR = hnp.arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32))
WEIGHT = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
WEIGHED = st.lists(st.tuples(VECTOR, WEIGHT), min_size=1, max_size=8).filter(
    lambda pairs: any(weight > 0.0 for _, weight in pairs)
)


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def test_a_mean_is_as_computed_by_hand() -> None:
    assert weighted_mean([vector(8.0, 0.0), vector(4.0, 4.0)], [1.0, 3.0]).tolist() == [5.0, 3.0]


@settings(deadline=None)
@given(weighed=WEIGHED)
def test_a_mean_agrees_with_the_mean_in_double_precision(weighed: list[tuple[Vector, float]]) -> None:
    vectors, weights = [pair[0] for pair in weighed], [pair[1] for pair in weighed]
    largest = max(weights)
    shares = [weight / largest for weight in weights]
    expected = sum(v.astype(np.float64) * share for v, share in zip(vectors, shares, strict=True)) / math.fsum(shares)
    assert np.allclose(weighted_mean(vectors, weights), expected, rtol=0.0, atol=1e6 * 8 * 2.0**-22)


@settings(deadline=None)
@given(weighed=WEIGHED)
def test_every_bit_is_that_of_separate_float32_operations_in_the_given_order(
    weighed: list[tuple[Vector, float]],
) -> None:
    vectors, weights = [pair[0] for pair in weighed], [pair[1] for pair in weighed]
    exponent = math.frexp(max(weights))[1]
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    shares = [np.float32(weight / math.fsum(scaled)) for weight in scaled]
    expected = []
    for position in range(6):
        total = np.float32(vectors[0][position] * shares[0])
        for each_N, share in zip(vectors[1:], shares[1:], strict=True):
            total = np.float32(total + np.float32(each_N[position] * share))
        expected.append(total.tobytes())
    mean_N = weighted_mean(vectors, weights)
    assert [element.tobytes() for element in mean_N] == expected


@settings(deadline=None)
@given(weighed=WEIGHED, exponent=st.integers(-20, 20))
def test_the_unit_of_weights_changes_no_bit(weighed: list[tuple[Vector, float]], exponent: int) -> None:
    # Powers of two, and weights that stay normal numbers: exact in any unit.
    vectors = [pair[0] for pair in weighed]
    weights = [1.0 + min(weight, 1e6) for _, weight in weighed]
    scaled = [math.ldexp(weight, exponent) for weight in weights]
    assert weighted_mean(vectors, weights).tobytes() == weighted_mean(vectors, scaled).tobytes()


def test_a_single_contribution_is_its_own_mean() -> None:
    vector_N = vector(0.1, -3.7e20, 1e-40)
    assert weighted_mean([vector_N], [0.3]).tobytes() == vector_N.tobytes()


def test_every_element_of_many_blocks_is_averaged_in_fresh_memory() -> None:
    first_N = np.arange(2 * CACHED_ELEMENTS + 3, dtype=np.float32)
    mean_N = weighted_mean([first_N, first_N + 2.0], [1.0, 1.0])
    assert np.array_equal(mean_N, first_N + 1.0)
    assert not np.shares_memory(mean_N, first_N)


def test_the_largest_weights_do_not_overflow() -> None:
    largest = float(np.finfo(np.float64).max)
    assert weighted_mean([vector(2.0), vector(4.0)], [largest, largest]).tolist() == [3.0]


def test_a_contribution_of_weight_zero_changes_nothing() -> None:
    assert weighted_mean([vector(2.0), vector(4.0)], [0.0, 5e-324]).tolist() == [4.0]


@pytest.mark.parametrize(
    ("vectors", "weights", "text"),
    [
        ([], [], "cannot average 0 contributions with 0 weights"),
        ([vector(1.0)], [1.0, 2.0], "cannot average 1 contributions with 2 weights"),
        ([vector(1.0), vector(1.0, 2.0)], [1.0, 1.0], r"cannot average contributions of \[1, 2\] elements"),
        ([vector(1.0), vector(1.0)], [2.0, -1.0], r"weights \[2.0, -1.0\] are not all finite and at least 0"),
        ([vector(1.0)], [math.nan], r"weights \[nan\] are not all finite"),
        ([vector(1.0)], [math.inf], r"weights \[inf\] are not all finite"),
        ([vector(1.0), vector(2.0)], [0.0, 0.0], "all 2 contributions have weight 0; the span is skipped this round"),
    ],
)
def test_a_mean_of_nothing_is_refused(vectors: list[Vector], weights: list[float], text: str) -> None:
    with pytest.raises(RoundError, match=text):
        weighted_mean(vectors, weights)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_contribution_that_is_not_finite_never_becomes_a_mean(value: float, weight: float) -> None:
    with pytest.raises(NonFiniteUpdate, match="the mean of 2 contributions holds 1 non-finite numbers among 2"):
        weighted_mean([vector(1.0, 1.0), vector(1.0, value)], [1.0, weight])
