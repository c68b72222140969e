"""Lies are what their names say, and none is longer than reducers accept."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.vectors import BLOCK, Vector
from p2p_diloco.errors import ConfigError
from research.lies import LIES, VAST_CLAIM, Liar

LIMIT = 4.0


def vectors(count: int) -> list[Vector]:
    rng = np.random.default_rng(1)
    return [(rng.standard_normal(3 * BLOCK + 5) / 14.0).astype(np.float32) for _ in range(count)]


def told(lie: str) -> tuple[Vector, Vector, list[Vector]]:
    honest_N, *others = vectors(5)
    return Liar(lie, {0: others}).instead_of(honest_N, 0, LIMIT), honest_N, others


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_longer_than_reducers_accept_or_the_honest_vector(lie: str) -> None:
    sent_N, honest_N, others = told(lie)
    assert len(sent_N) == len(honest_N)
    assert np.linalg.norm(sent_N) <= max(LIMIT, np.linalg.norm(honest_N), np.linalg.norm(others[0]))


@pytest.mark.parametrize("lie", ["flip", "flip-longest"])
def test_a_flip_points_against_what_the_island_learnt(lie: str) -> None:
    sent_N, honest_N, _ = told(lie)
    assert sent_N @ honest_N == pytest.approx(-np.linalg.norm(sent_N) * np.linalg.norm(honest_N), rel=1e-5)


@pytest.mark.parametrize("lie", ["flip-mean", "flip-in-blocks"])
def test_a_flip_of_the_mean_points_against_the_others(lie: str) -> None:
    sent_N, _, others = told(lie)
    mean_N = np.mean(others, axis=0)
    assert sent_N @ mean_N < -0.9 * np.linalg.norm(sent_N) * np.linalg.norm(mean_N)


def test_one_block_holds_the_whole_length() -> None:
    sent_N, _, _ = told("one-block")
    assert np.count_nonzero(np.add.reduceat(np.abs(sent_N), range(0, len(sent_N), BLOCK))) == 1
    assert np.linalg.norm(sent_N) == pytest.approx(0.98 * LIMIT)


def test_a_drift_keeps_its_direction() -> None:
    honest_N, *others = vectors(5)
    liar = Liar("drift", {0: others})
    first_N, second_N = (liar.instead_of(one_N, 0, LIMIT) for one_N in (honest_N, others[1]))
    assert np.array_equal(first_N, second_N)


def test_a_copy_is_the_contribution_of_another_and_zeros_are_zero() -> None:
    sent_N, _, others = told("copy")
    assert sent_N is others[0]
    assert not told("zeros")[0].any()


def test_with_a_claim_it_reports_a_vast_number_of_tokens() -> None:
    assert (Liar("flip", {}).claims, Liar("flip+claim", {}).claims) == (1, VAST_CLAIM)


@pytest.mark.parametrize("lie", ["flop", "flip+", "flip+tokens"])
def test_an_unknown_lie_is_refused(lie: str) -> None:
    with pytest.raises(ConfigError, match="unknown lie"):
        Liar(lie, {})
