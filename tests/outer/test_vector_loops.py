"""Compiled loops over whole vectors give the bits of the NumPy code for any numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import Vector, count_non_finite, euclidean_norm, numpy_alone
from p2p_diloco.errors import NonFiniteUpdate
from p2p_diloco.outer.outer_step import MergeRule, OuterRule, apply_outer_step, merge_local
from p2p_diloco.outer.state import pseudo_gradient
from simulator.maths import weighted_mean

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=60)
seeds = st.integers(min_value=0, max_value=2**32 - 1)
sizes = st.integers(min_value=64, max_value=700) | st.sampled_from([16_384, 16_385, 40_000])


def vectors(seed: int, elements: int, count: int, *, largest: float) -> list[Vector]:
    """Return vectors of numbers of all magnitudes below `largest`, including subnormal ones and zeros of both signs."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        vector_N = rng.integers(0, 1 << 32, elements, dtype=np.uint32).view(np.float32)
        vector_N[~(np.abs(vector_N) < largest)] = -0.0
        made.append(np.where(rng.random(elements) < 0.3, rng.standard_normal(elements, dtype=np.float32), vector_N))
    return made


def same_bits(make: Callable[[], Vector | tuple[Vector, ...]]) -> None:
    compiled = make()
    with numpy_alone():
        by_numpy = make()
    if isinstance(compiled, np.ndarray):
        compiled, by_numpy = (compiled,), (by_numpy,)  # type: ignore[assignment]
    for one_N, other_N in zip(compiled, by_numpy, strict=True):
        assert np.array_equal(one_N.view(np.uint32), other_N.view(np.uint32))


@reproducible
@given(seed=seeds, elements=sizes, rate=st.sampled_from([0.7, 1.0, 0.3]), momentum=st.sampled_from([0.0, 0.5, 0.9]))
def test_an_outer_step_has_the_same_bits(seed: int, elements: int, rate: float, momentum: float) -> None:
    anchor_N, momentum_N, update_N = vectors(seed, elements, 3, largest=1e37)
    rule = OuterRule(learning_rate=rate, momentum=momentum)
    same_bits(lambda: apply_outer_step(anchor_N, momentum_N, update_N, rule))


@reproducible
@given(seed=seeds, elements=sizes, has_own=st.booleans())
def test_a_merge_has_the_same_bits(seed: int, elements: int, has_own: bool) -> None:
    local_N, before_N, after_N, own_N = vectors(seed, elements, 4, largest=1e37)
    same_bits(lambda: merge_local(local_N, before_N, after_N, own_N if has_own else None, MergeRule()))


@reproducible
@given(seed=seeds, elements=sizes, in_flight=st.integers(min_value=0, max_value=3))
def test_a_pseudo_gradient_has_the_same_bits(seed: int, elements: int, in_flight: int) -> None:
    anchor_N, local_N, *sent = vectors(seed, elements, 2 + in_flight, largest=1e37)
    same_bits(lambda: pseudo_gradient(anchor_N, local_N, sent))


@reproducible
@given(seed=seeds, elements=sizes, weights=st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=6))
def test_a_mean_has_the_same_bits(seed: int, elements: int, weights: list[float]) -> None:
    parts = vectors(seed, elements, len(weights), largest=1e37)
    same_bits(lambda: weighted_mean(parts, weights))


@reproducible
@given(seed=seeds, elements=sizes)
def test_a_norm_is_equal_up_to_the_last_digits(seed: int, elements: int) -> None:
    (vector_N,) = vectors(seed, elements, 1, largest=float("inf"))
    compiled = euclidean_norm(vector_N)
    with numpy_alone():
        assert compiled == pytest.approx(euclidean_norm(vector_N), rel=1e-13)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 16_384, 20_000])
def test_numbers_that_are_not_finite_are_found_anywhere(wrong: float, place: int) -> None:
    anchor_N, momentum_N, update_N = vectors(3, 20_001, 3, largest=1e30)
    update_N[place] = wrong
    assert count_non_finite(update_N) == 1
    assert not np.isfinite(euclidean_norm(update_N))
    with pytest.raises(NonFiniteUpdate, match="the update holds 1 and the step along it 1 non-finite numbers"):
        apply_outer_step(anchor_N, momentum_N, update_N, OuterRule())
    with pytest.raises(NonFiniteUpdate, match="1 non-finite numbers among 20001"):
        weighted_mean([anchor_N, update_N], [1.0, 1.0])
