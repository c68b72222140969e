"""Claims about the pseudo-gradient and its clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2p_diloco.codec.vectors import CACHED_ELEMENTS, Vector, euclidean_norm
from p2p_diloco.outer.state import clip_to_norm, pseudo_gradient

WHOLE = hnp.arrays(np.float32, 5, elements=st.integers(-1000, 1000).map(float))
# Not below 2⁻⁶⁰: clipping rounds relatively, and subnormal results round absolutely.
VECTORS = hnp.arrays(np.float32, 40, elements=st.one_of(st.just(0.0), st.floats(2.0**-60, 2.0**60, width=32)))


@settings(deadline=None)
@given(anchor_N=WHOLE, local_N=WHOLE, in_flight=st.lists(WHOLE, max_size=8))
def test_it_is_the_anchor_minus_local_minus_contributions_in_flight(
    anchor_N: Vector, local_N: Vector, in_flight: list[Vector]
) -> None:
    exact = anchor_N.astype(np.int64) - local_N.astype(np.int64) - sum(c.astype(np.int64) for c in in_flight)
    delta_N = pseudo_gradient(anchor_N, local_N, in_flight)
    assert delta_N.dtype == np.float32
    assert np.array_equal(delta_N, exact)


def test_it_covers_every_element_of_a_vector_of_many_blocks() -> None:
    anchor_N = np.arange(2 * CACHED_ELEMENTS + 3, dtype=np.float32)
    ones_N = np.ones_like(anchor_N)
    assert np.array_equal(pseudo_gradient(anchor_N, ones_N, [ones_N, ones_N]), anchor_N - 3.0)


def test_it_does_not_change_its_arguments() -> None:
    vectors = [np.full(3, value, dtype=np.float32) for value in (5.0, 3.0, 1.0)]
    delta_N = pseudo_gradient(vectors[0], vectors[1], [vectors[2]])
    assert [float(vector[0]) for vector in vectors] == [5.0, 3.0, 1.0]
    assert not any(np.shares_memory(delta_N, vector) for vector in vectors)


def test_diverged_local_parameters_give_no_warning() -> None:
    local_N = np.array([math.inf, math.nan, 1.0], dtype=np.float32)
    decoded_N = np.array([-math.inf, 0.0, 0.0], dtype=np.float32)
    delta_N = pseudo_gradient(np.zeros(3, dtype=np.float32), local_N, [decoded_N])
    assert np.array_equal(np.isfinite(delta_N), [False, False, True])


@settings(deadline=None)
@given(delta_N=VECTORS, limit=st.floats(2.0**-40, 2.0**70))
def test_a_clipped_vector_is_just_within_the_limit(delta_N: Vector, limit: float) -> None:
    clipped_N, norm = clip_to_norm(delta_N, limit)
    assert norm == euclidean_norm(delta_N)
    assert euclidean_norm(clipped_N) <= limit
    if norm > limit:
        assert euclidean_norm(clipped_N) >= limit * (1.0 - 2.0**-20)


def test_clipping_keeps_the_direction_and_reports_the_norm_before() -> None:
    clipped_N, norm = clip_to_norm(np.array([30.0, -40.0], dtype=np.float32), 5.0)
    assert norm == 50.0
    assert clipped_N.tolist() == pytest.approx([3.0, -4.0], rel=1e-6)


@pytest.mark.parametrize("limit", [5.0, math.inf])
def test_a_vector_within_the_limit_is_not_changed(limit: float) -> None:
    delta_N = np.array([3.0, -4.0], dtype=np.float32)
    assert clip_to_norm(delta_N, limit)[0] is delta_N


def test_clipping_to_zero_gives_zero() -> None:
    assert clip_to_norm(np.array([3.0, -4.0], dtype=np.float32), 0.0)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clipping_does_not_hide_a_non_finite_number(value: float) -> None:
    clipped_N, norm = clip_to_norm(np.array([value, 1.0], dtype=np.float32), 1.0)
    assert not math.isfinite(norm)
    assert not np.isfinite(clipped_N).all()
