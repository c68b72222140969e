"""The model of goodput: its limits, an example worked by hand, and the fit."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.goodput.model import (
    CHIP_SECONDS,
    DATA_PARALLEL,
    DILOCO,
    OURS,
    PUBLISHED,
    Constants,
    Point,
    fit,
    goodput_of,
    share_present,
    share_trained,
)

YEAR = 31_536_000
BY_HAND = Constants(rigid_pause_seconds=60.0, elastic_pause_seconds=20.0, away_chip_seconds=YEAR / 4)


def point(units: int, chips: int = 1_200_000, *, system: str = DILOCO, elastic: bool = True) -> Point:
    return Point(system=system, elastic=elastic, units=units, chips=chips)


def test_goodput_worked_by_hand() -> None:
    # A year of seconds has 31,536,000: of 1,576,800 chips, one fails every 20 s.
    assert CHIP_SECONDS == YEAR
    assert share_present(BY_HAND) == pytest.approx(0.8)
    # It trains for 20 s and stands for 20 s: half of the time, with 80 % of its chips.
    assert goodput_of(point(1, 1_576_800), BY_HAND) == pytest.approx(0.4)
    # Two units: 40 s of training to 20 s of standing.
    assert goodput_of(point(2, 1_576_800), BY_HAND) == pytest.approx(0.8 * 40 / 60)
    # If a failure costs 10 s besides, only 30 of the 40 count.
    assert goodput_of(point(2, 1_576_800), BY_HAND, 10.0) == pytest.approx(0.8 * 30 / 60)
    # A unit that is not elastic waits for all of its chips: 20 s of training to 60 s of standing.
    assert goodput_of(point(1, 1_576_800, elastic=False), BY_HAND) == pytest.approx(20 / 80)


def test_goodput_is_1_without_failures_and_never_below_0() -> None:
    unharmed = Constants(rigid_pause_seconds=0.0, elastic_pause_seconds=0.0, away_chip_seconds=0.0)
    assert goodput_of(point(1), unharmed) == goodput_of(point(1, elastic=False), unharmed) == 1.0
    assert share_trained(0.0, 100.0, 100.0) == 1.0
    assert share_trained(1_576_800.0, 0.0, 20.0) == 0.0
    assert share_trained(1_576_800.0, 0.0, 30.0) == 0.0


def test_one_learner_is_data_parallel() -> None:
    alone = point(1, system=DATA_PARALLEL)
    assert goodput_of(point(1), BY_HAND) == goodput_of(alone, BY_HAND)


@pytest.mark.parametrize("further", [0.0, 5.0])
def test_more_chips_count_for_less_and_more_islands_for_more(further: float) -> None:
    by_chips = [goodput_of(point(4, chips, system=OURS), BY_HAND, further) for chips in (10**5, 10**6, 10**7)]
    assert by_chips == sorted(by_chips, reverse=True)
    by_units = [goodput_of(point(units, system=OURS), BY_HAND, further) for units in (1, 2, 8, 64, 1024)]
    assert by_units == sorted(by_units)
    assert by_units[-1] < share_present(BY_HAND)
    assert goodput_of(point(8), BY_HAND, further) == pytest.approx(goodput_of(point(16, 2_400_000), BY_HAND, further))


def test_fit_finds_the_constants_that_made_the_points() -> None:
    made = [point(units) for units in (1, 2, 8, 16)] + [point(1, elastic=False)]
    points = [dataclasses.replace(p, published=goodput_of(p, BY_HAND)) for p in made]
    assert dataclasses.astuple(fit(points)) == pytest.approx(dataclasses.astuple(BY_HAND))


def test_fit_is_the_best_for_goodput() -> None:
    fitted = [p for p in PUBLISHED if p.is_fitted]
    best = fit(fitted)

    def squares(constants: Constants) -> float:
        return sum((goodput_of(p, constants) - (p.published or 0.0)) ** 2 for p in fitted)

    for name in ("rigid_pause_seconds", "elastic_pause_seconds", "away_chip_seconds"):
        for factor in (0.8, 1.25):
            other = dataclasses.replace(best, **{name: getattr(best, name) * factor})
            assert squares(other) > squares(best), (name, factor)


def test_five_published_points_are_fitted_and_four_predicted_within_five_points() -> None:
    fitted = [p for p in PUBLISHED if p.is_fitted]
    assert [p.published for p in fitted] == [0.27, 0.58, 0.70, 0.88, 0.93]
    assert [p.published for p in PUBLISHED if not p.is_fitted] == [0.18, 0.40, 0.80, 0.86]
    constants = fit(fitted)
    for p in PUBLISHED:
        assert goodput_of(p, constants) == pytest.approx(p.published, abs=0.05), p
    assert constants.rigid_pause_seconds == pytest.approx(71.05, abs=0.01)  # (1 / 0.27 − 1) T / 1.2 million
    assert constants.elastic_pause_seconds == pytest.approx(18.08, abs=0.01)
    assert share_present(constants) == pytest.approx(0.961, abs=0.001)
