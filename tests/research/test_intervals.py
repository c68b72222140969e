"""Gaps and their intervals: by hand, and against simulated trials."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from research.intervals import paired_gap, student_t
from research.setting import Outcome


def outcomes(losses: list[float]) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(name="row", seed=seed, loss=loss, tokens=100, bytes_sent_per_parameter=2.0, seconds=1.0)
        for seed, loss in enumerate(losses)
    )


def judged(losses_SB: np.ndarray) -> tuple[Outcome, ...]:
    return tuple(
        replace(one, blocks=tuple(row_B.tolist()))
        for one, row_B in zip(outcomes(losses_SB.mean(axis=1).tolist()), losses_SB, strict=True)
    )


def test_gaps_are_taken_seed_by_seed() -> None:
    gap = paired_gap(outcomes([1.01, 2.06]), outcomes([1.0, 2.0]))
    assert gap.mean == pytest.approx(0.02)
    # Gaps 0.01 and 0.03: deviation 0.01414, over √2, times t of one degree of freedom.
    assert gap.half_width == pytest.approx(12.71 * 0.01, rel=1e-3)
    assert paired_gap(outcomes([1.1]), outcomes([1.0])).half_width is None
    assert paired_gap(outcomes([1.1, 1.1]), outcomes([1.0, 1.0])).half_width == 0.0
    many = paired_gap(outcomes([1.0, 1.1] * 10), outcomes([1.0] * 20))
    assert many.half_width == pytest.approx(2.093 * 0.0513 / 20**0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("freedom", "error", "t"),
    [(1, 0.05, 12.706), (2, 0.05, 4.303), (7, 0.05, 2.365), (7, 0.01, 3.499), (30, 0.05, 2.042), (1000, 0.05, 1.962)],
)
def test_t_is_that_of_the_tables(freedom: float, error: float, t: float) -> None:
    assert student_t(freedom, error) == pytest.approx(t, rel=3e-4)


def test_more_comparisons_make_wider_intervals() -> None:
    ours, theirs = outcomes([1.01, 1.02, 1.03]), outcomes([1.0, 1.0, 1.0])
    one, ten = (paired_gap(ours, theirs, comparisons) for comparisons in (1, 10))
    assert one.mean == ten.mean
    assert ten.half_width == pytest.approx(one.half_width * student_t(2, 0.005) / student_t(2, 0.05))


def test_the_variance_over_pieces_is_added_to_that_over_seeds() -> None:
    # Gaps of 0.01 and 0.03 by seed, the same in all pieces; then by piece, the same with all seeds.
    theirs = judged(np.ones((2, 2)))
    by_seed = paired_gap(judged(np.array([[1.01, 1.01], [1.03, 1.03]])), theirs)
    by_piece = paired_gap(judged(np.array([[1.01, 1.03], [1.01, 1.03]])), theirs)
    assert by_seed.mean == by_piece.mean == pytest.approx(0.02)
    assert by_seed.half_width == by_piece.half_width == pytest.approx(12.71 * 0.01, rel=1e-3)
    # Both at once: variances of 0.01² each, and 1 + 1 degrees of freedom.
    both = paired_gap(judged(np.array([[1.00, 1.02], [1.02, 1.04]])), theirs)
    assert both.half_width == pytest.approx(4.303 * 0.01 * 2**0.5, rel=1e-3)


def test_outcomes_without_pieces_are_compared_by_seed() -> None:
    pieces = judged(np.array([[1.0, 3.0], [1.0, 3.0]]))
    assert paired_gap(pieces, outcomes([2.0, 2.0])).mean == 0.0


def test_an_interval_covers_the_true_gap_as_often_as_it_promises() -> None:
    rng = np.random.default_rng(5)
    rounds, covered = 400, 0
    for _ in range(rounds):
        seeds_S1, pieces_1B = rng.normal(0, 0.01, (8, 1)), rng.normal(0, 0.02, (1, 16))
        ours_SB = 1.0 + seeds_S1 + pieces_1B + rng.normal(0, 0.01, (8, 16))
        gap = paired_gap(judged(ours_SB), judged(np.ones((8, 16))))
        assert gap.half_width is not None
        covered += abs(gap.mean) <= gap.half_width
    assert 0.92 <= covered / rounds <= 0.99
