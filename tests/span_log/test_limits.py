"""Weights, medians and their published bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.span_log import (
    RADIUS_BOUNDS,
    RADIUS_MOVED,
    WEIGHT_BOUNDS,
    as_float32,
    contribution_weight,
    counted_norm,
    founding_radius,
    levelled,
    lower_median,
    median_around,
    weight_limit,
    within_reach,
)


@pytest.mark.parametrize(("tokens", "weight"), [(1024, 1024.0), (0, 0.0), (-1, 0.0), (1 << 80, WEIGHT_BOUNDS[1])])
def test_a_weight_is_the_number_of_tokens_within_bounds(tokens: int, weight: float) -> None:
    assert contribution_weight(tokens) == weight


@pytest.mark.parametrize(
    ("last_median", "ratio", "limit"), [(2.0, 4.0, 8.0), (2.0, 3.0, 6.0), (0.0, 4.0, 1.0), (2.0**64, 4.0, 2.0**64)]
)
def test_a_weight_is_at_most_a_multiple_of_the_last_median(last_median: float, ratio: float, limit: float) -> None:
    assert weight_limit(last_median, ratio) == limit
    assert contribution_weight(1 << 70, limit) == limit


@pytest.mark.parametrize(
    ("values", "expected"), [([7.0], 7.0), ([1.0, 9.0], 1.0), ([9.0, 1.0, 5.0], 5.0), ([4.0, 2.0, 8.0, 6.0], 4.0)]
)
def test_the_median_is_the_lower_of_the_two_in_the_middle(values: list[float], expected: float) -> None:
    assert lower_median(values) == expected


@given(st.lists(st.floats(0, 1e30), min_size=1))
def test_the_median_is_one_of_the_values(values: list[float]) -> None:
    median = lower_median(values)
    assert median in values
    assert sum(value <= median for value in values) * 2 >= len(values)


@given(st.floats(allow_nan=False))
def test_float32_values_are_stable_and_finite(value: float) -> None:
    assert as_float32(as_float32(value)) == as_float32(value)
    assert math.isfinite(as_float32(value))


@pytest.mark.parametrize(
    ("median", "last", "published"),
    [(9.0, 1.0, 4.0), (0.1, 1.0, 0.5), (0.6, 4.0, 1.0), (2.0, 1.0, 2.0), (1e9, 1e9, 16.0), (0.0, 0.0, 0.5)],
)
def test_a_published_median_moves_by_at_most_a_factor_within_bounds(
    median: float, last: float, published: float
) -> None:
    assert within_reach(median, last, (0.5, 16.0), 4.0) == published


@given(st.floats(2.0**-20, 2.0**40), st.floats(0.0, 1e12))
def test_what_is_published_as_float32_is_still_within_reach(last: float, median: float) -> None:
    """An owner computes it, and others compare the number that arrived with the bounds."""
    last = as_float32(last)
    published = within_reach(as_float32(median), last, RADIUS_BOUNDS, RADIUS_MOVED)
    assert as_float32(published) == published
    assert within_reach(published, last, RADIUS_BOUNDS, RADIUS_MOVED) == published


@pytest.mark.parametrize(
    ("claimed", "counted"), [(1e-30, 2.0), (0.0, 2.0), (2.0, 2.0), (5.0, 5.0), (8.0, 8.0), (1e30, 8.0)]
)
def test_a_claimed_norm_counts_between_the_measured_one_and_four_times_it(claimed: float, counted: float) -> None:
    assert counted_norm(claimed, 2.0) == counted


@pytest.mark.parametrize(
    ("values", "last", "median"),
    [
        ((3.0,), 1.0, 3.0),
        ((1.0, 5.0), 3.0, 3.0),  # one of two alone moves nothing
        ((1.0, 2.0), 3.0, 2.0),  # both are shorter: as far as the longer one
        ((4.0, 5.0), 3.0, 4.0),  # both are longer: as far as the shorter one
        ((1.0, 2.0, 9.0), 5.0, 2.0),
        ((1.0, 2.0, 6.0, 9.0), 5.0, 5.0),
    ],
)
def test_of_two_norms_in_the_middle_the_nearer_to_the_last_radius_is_the_median(
    values: tuple[float, ...], last: float, median: float
) -> None:
    assert median_around(values, last) == median


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0, 2.0, 9.0], (1.0, 2.0, 2.0)), ([1.0, 9.0], (1.0, 1.0)), ([9.0], (9.0,)), ([0.0, 5.0, 7.0], (0.0, 5.0, 5.0))],
    ids=["three", "two", "one", "without those that have no weight"],
)
def test_among_strangers_no_weight_exceeds_the_lower_median(weights: list[float], expected: tuple[float, ...]) -> None:
    assert levelled(weights) == expected
    assert levelled(expected) == expected


@given(st.lists(st.floats(1, 2.0**64, width=32), min_size=1, max_size=9), st.floats(1, 2.0**64, width=32))
def test_among_strangers_no_claim_gets_more_than_one_share_of_more_than_half(others: list[float], claim: float) -> None:
    found = levelled([*others, claim])
    assert found[-1] <= math.fsum(found) / (len(found) // 2 + 1) * (1 + 1e-12)


@given(st.integers(1, 1 << 40))
def test_a_founding_radius_is_a_sixteenth_per_element_in_float32(elements: int) -> None:
    assert founding_radius(elements) == float(np.float32(math.sqrt(elements) / 16))
