"""Claims about radial means: lengths and directions of a block are averaged separately."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import BLOCK, Vector, num_blocks, numpy_alone
from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.outer.mean import mark_radial, shares_of, sums_of_blocks
from simulator.maths import radial_mean, weighted_mean

K = BLOCK
ALL = np.ones(1, np.bool_)


def block(*values: float) -> Vector:
    return np.array([*values, *[0.0] * (K - len(values))], np.float32)


def draws(seed: int, num_vectors: int, elements: int) -> list[Vector]:
    """Return partly aligned vectors, with blocks of zeros and of very different lengths."""
    rng = np.random.default_rng(seed)
    common_N, blocks = rng.standard_normal(elements), num_blocks(elements)
    vectors = []
    for _ in range(num_vectors):
        size_B = np.exp2(rng.integers(-40, 20, blocks)) * (rng.random(blocks) < 0.9)
        vector_N = (0.3 * common_N + rng.standard_normal(elements)) * np.repeat(size_B, K)[:elements]
        vectors.append(vector_N.astype(np.float32))
    return vectors


def lengths(vector_N: Vector) -> list[float]:
    starts = range(0, len(vector_N), K)
    return [math.sqrt(math.fsum(float(x) ** 2 for x in vector_N[start : start + K])) for start in starts]


@pytest.mark.parametrize(
    ("vectors", "weights", "expected"),
    [
        ([(3.0, 0.0), (0.0, 3.0)], [1.0, 1.0], (3 * math.sqrt(0.5), 3 * math.sqrt(0.5))),
        ([(4.0, 0.0), (0.0, 2.0)], [1.0, 1.0], (3 * math.sqrt(0.5), 3 * math.sqrt(0.5))),
        ([(5.0, 0.0), (1.0, 0.0)], [3.0, 1.0], (4.0, 0.0)),
        ([(3.0, 0.0), (0.0, 4.0)], [1.0, 0.0], (3.0, 0.0)),
        ([(2.0, 0.0), (0.0, 0.0)], [1.0, 1.0], (1.0, 0.0)),
        ([(2.0, 0.0), (-2.0, 0.0)], [1.0, 1.0], (0.0, 0.0)),
        ([(0.0, 0.0), (0.0, 0.0)], [1.0, 1.0], (0.0, 0.0)),
    ],
    ids=["orthogonal", "of two lengths", "in line", "of no weight", "nothing from one", "opposite", "nothing"],
)
def test_radial_means_match_the_calculation_by_hand(
    vectors: list[tuple[float, float]], weights: list[float], expected: tuple[float, float]
) -> None:
    mean_N = radial_mean([block(*values) for values in vectors], weights, ALL)
    assert mean_N[:2].tolist() == pytest.approx(expected, rel=1e-6)
    assert not mean_N[2:].any()


@pytest.mark.parametrize("num_vectors", [2, 4, 16, 64])
def test_orthogonal_vectors_keep_their_length_for_any_number_of_them(num_vectors: int) -> None:
    vectors = [block(*[0.0] * place, 2.0) for place in range(num_vectors)]
    assert lengths(radial_mean(vectors, [1.0] * num_vectors, ALL)) == pytest.approx([2.0])
    assert lengths(weighted_mean(vectors, [1.0] * num_vectors)) == pytest.approx([2.0 / math.sqrt(num_vectors)])


def test_the_length_of_a_vector_does_not_change_the_direction_of_the_mean() -> None:
    honest, long_N = block(1.0, 1.0), block(0.0, 1.0)
    means = [radial_mean([honest, long_N * np.float32(factor)], [1.0, 1.0], ALL) for factor in (1.0, 1e6)]
    directions = [mean_N / lengths(mean_N)[0] for mean_N in means]
    assert np.allclose(*directions, rtol=1e-6)


def test_noise_is_not_amplified() -> None:
    # Almost opposite vectors: what remains is noise, ten thousand times shorter than they are.
    mean_N = radial_mean([block(1.0, 1e-4), block(-1.0, 1e-4)], [1.0, 1.0], ALL)
    assert lengths(mean_N) == pytest.approx([math.sqrt(2.0) * 1e-4], rel=1e-4)


def check_formula(seed: int, num_vectors: int, elements: int) -> None:
    """Check a mean of random vectors block by block; about 70 % of its blocks are radial."""
    vectors, weights = draws(seed, num_vectors, elements), list(np.random.default_rng(seed).random(num_vectors) + 0.01)
    is_radial_B = np.random.default_rng(seed).random(num_blocks(elements)) < 0.7
    mean_N, plain_N = radial_mean(vectors, weights, is_radial_B), weighted_mean(vectors, weights)
    with numpy_alone():
        assert np.array_equal(mean_N, radial_mean(vectors, weights, is_radial_B))
    lengths_PB, lengths_of_mean = [lengths(vector_N) for vector_N in vectors], lengths(mean_N)
    shares = [float(share) for share in shares_of(weights, num_vectors)]
    for place, is_radial in enumerate(is_radial_B):
        here = slice(place * K, min((place + 1) * K, elements))
        if not is_radial:
            assert np.array_equal(mean_N[here], plain_N[here])
            continue
        radii = [lengths_B[place] for lengths_B in lengths_PB]
        radius = sum(share * length for share, length in zip(shares, radii, strict=True))
        units = [
            share / length * vector_N[here].astype(np.float64)
            for share, length, vector_N in zip(shares, radii, vectors, strict=True)
            if length
        ]
        there = [share for share, length in zip(shares, radii, strict=True) if length]
        direction_K = sum(units, np.zeros(here.stop - here.start))
        stretch = radius / max(float(np.linalg.norm(direction_K)), math.hypot(*there)) if there else 0.0
        assert np.allclose(mean_N[here], direction_K * stretch, rtol=1e-5, atol=1e-30)
        assert lengths_of_mean[place] <= radius * (1.0 + 1e-6)


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 20), num_vectors=st.integers(1, 6), elements=st.integers(1, 5 * K + 7))
def test_it_agrees_with_the_formula_and_is_never_longer_than_the_mean_length(
    seed: int, num_vectors: int, elements: int
) -> None:
    check_formula(seed, num_vectors, elements)


def test_spans_of_many_blocks_are_radial_to_their_end() -> None:
    check_formula(1, 3, 1200 * K)


@pytest.mark.parametrize("elements", [1, K - 1, K, K + 1, 40 * K + 3, 1200 * K])
def test_a_single_contribution_is_its_own_mean(elements: int) -> None:
    vector_N = draws(3, 1, elements)[0]
    marks_B = np.ones(num_blocks(elements), np.bool_)
    assert np.array_equal(radial_mean([vector_N], [0.3], marks_B), vector_N)


def test_vectors_are_not_changed() -> None:
    vectors = draws(5, 3, 2 * K)
    before = [vector_N.copy() for vector_N in vectors]
    radial_mean(vectors, [1.0, 2.0, 3.0], np.ones(2, np.bool_))
    assert all(np.array_equal(*pair) for pair in zip(vectors, before, strict=True))


@pytest.mark.parametrize(
    ("start", "stop", "plain", "expected"),
    [
        (0, 4 * K, [], [1, 1, 1, 1]),
        (0, 4 * K, [(K, 2 * K)], [1, 0, 1, 1]),
        (0, 4 * K, [(K + 1, K + 2), (3 * K - 1, 3 * K + 1)], [1, 0, 0, 0]),
        (2 * K, 4 * K, [(0, 2 * K), (4 * K, 9 * K)], [1, 1]),
        (2 * K, 4 * K, [(0, 2 * K + 1)], [0, 1]),
        (2 * K, 4 * K + 5, [(4 * K + 4, 9 * K)], [1, 1, 0]),
        (0, 2 * K, [(0, 2 * K)], [0, 0]),
    ],
)
def test_blocks_with_an_element_of_an_embedding_are_plain(
    start: int, stop: int, plain: list[tuple[int, int]], expected: list[int]
) -> None:
    assert mark_radial(start, stop, plain).tolist() == [bool(mark) for mark in expected]


def halves(values: list[float]) -> float:
    while len(values) > 1:
        values = [
            one + other for one, other in zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)
        ]
    return values[0]


def test_blocks_of_all_magnitudes_are_summed_by_halves() -> None:
    rng = np.random.default_rng(7)
    values_BK = rng.standard_normal((300, K)) * np.exp2(rng.integers(-30, 30, (300, K)))
    assert sums_of_blocks(values_BK).tolist() == [halves(values_K.tolist()) for values_K in values_BK]


def test_a_sum_has_one_order() -> None:
    values_BK = np.zeros((1, K))
    values_BK[0, [0, 1, K // 2]] = 1.0, 2.0**-53, 2.0**-53
    assert sums_of_blocks(values_BK).tolist() == [1.0], "each addend alone is too small to change the first"
    values_BK[0, [1, K // 2]] = 0.0
    values_BK[0, [1, 1 + K // 2]] = 2.0**-53
    assert sums_of_blocks(values_BK).tolist() == [1.0 + 2.0**-52], "their sum is large enough"


def test_marks_of_another_span_are_refused() -> None:
    with pytest.raises(RoundError, match="got marks for 2 blocks"):
        radial_mean([block(1.0)], [1.0], np.ones(2, np.bool_))


def test_a_mean_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFiniteUpdate):
        radial_mean([block(math.inf)], [1.0], ALL)
    largest_N = np.full(K, np.finfo(np.float32).max)
    with pytest.raises(NonFiniteUpdate):
        radial_mean([largest_N, block(*[float(largest_N[0])] * (K - 1))], [1.0, 1.0], ALL)


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (9.0, 0.0)], 1.1),
        ([(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (-9.0, 0.0)], 0.5),
        ([(1.0, 0.0), (1.2, 0.0), (1.4, 0.0)], 1.2),
        ([(1.0, 0.0), (3.0, 0.0), (3.0, 0.0), (9.0, 0.0)], (1.0 + 3.0 + 3.0 + 4.5) / 4),
        ([(0.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (9.0, 0.0)], (1.0 + 1.0 + 1.5) / 5),
        ([(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (9.0, 0.0)], 2.0),
        ([(1.0, 0.0), (9.0, 0.0)], 5.0),
        ([(0.0, 0.0)] * 5, 0.0),
    ],
    ids=["too long", "too long and opposite", "all usual", "of four", "of three", "of two", "two", "nothing"],
)
@pytest.mark.parametrize("by_numpy", [False, True])
def test_a_longer_block_counts_for_one_and_a_half_medians_if_three_or_more_are_not_zero(
    vectors: list[tuple[float, float]], expected: float, by_numpy: bool
) -> None:
    blocks = [block(*values) for values in vectors]
    with numpy_alone() if by_numpy else nullcontext():
        mean_N = radial_mean(blocks, [1.0] * len(blocks), np.zeros(1, np.bool_), 1.5)
    assert mean_N[0] == pytest.approx(expected, rel=1e-6)
    assert not mean_N[1:].any()


def test_a_long_block_has_no_more_to_say_on_the_length_of_a_radial_mean() -> None:
    at_angles = [block(0.0, 1.0), block(0.0, 0.0, 1.0), block(0.0, 0.0, 0.0, 1.0)]
    usual, long = (radial_mean([*at_angles, block(length)], [1.0] * 4, ALL, 1.5) for length in (1.0, 100.0))
    assert lengths(usual) == pytest.approx([1.0])
    assert lengths(long) == pytest.approx([(3.0 + 1.5) / 4])
    assert long[0] == pytest.approx(long[1]), "its direction has a quarter, as before"
