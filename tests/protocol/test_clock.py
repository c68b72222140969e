"""Swarm time, rounds and cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.protocol.clock import LEAD_TURNS, RoundClock, middle_two

CLOCK = RoundClock(start_seconds=1000.0, round_seconds=10.0, num_fragments=4)


@pytest.mark.parametrize(("now", "expected"), [(1000.0, 0), (1009.9, 0), (1010.0, 1), (999.9, -1), (980.0, -2)])
def test_rounds_follow_each_other_from_the_start_time(now: float, expected: int) -> None:
    assert CLOCK.round_at(now) == expected


def test_a_round_has_its_deadlines_in_order() -> None:
    for r in range(-3, 9):
        assert CLOCK.begin(r) < CLOCK.contribute_by(r) < CLOCK.reduce_by(r) < CLOCK.begin(r + 1)


@given(st.integers(0, 10_000))
def test_each_cycle_exchanges_every_fragment_once(cycle: int) -> None:
    rounds = [r for r in range(cycle * 4, cycle * 4 + 4) if CLOCK.cycle(r) == cycle]
    assert [CLOCK.fragment(r) for r in rounds] == [0, 1, 2, 3]
    assert [CLOCK.is_last_of_cycle(r) for r in rounds] == [False, False, False, True]


@given(st.integers(0, 3), st.floats(1000.0, 5000.0))
def test_a_closed_round_is_the_last_of_its_fragment_that_is_over(fragment: int, now: float) -> None:
    closed = CLOCK.closed_round(fragment, now)
    assert closed < CLOCK.round_at(now) <= closed + 4
    assert closed % 4 == fragment


@pytest.mark.parametrize(("now", "turn"), [(1000.0, 0), (1002.5, 1), (1005.0, 2), (1009.9, 3), (999.0, 0), (1099.0, 3)])
def test_each_quarter_is_one_leaders_turn(now: float, turn: int) -> None:
    assert CLOCK.lead_turn(0, now) == turn
    assert turn < LEAD_TURNS


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ((0.0,), (0.0, 0.0)),
        ((5.0, 0.0), (0.0, 5.0)),
        ((9.0, 1e9, -1.0), (9.0, 9.0)),
        ((1e9, 1.0, 2.0, 0.0), (1.0, 2.0)),
    ],
)
def test_the_two_middle_offsets_are_both_the_median_if_their_number_is_odd(
    offsets: tuple[float, ...], expected: tuple[float, float]
) -> None:
    assert middle_two(offsets) == expected


@pytest.mark.parametrize(("round_seconds", "tolerance"), [(1.0, 0.5), (16.0, 2.0), (60.0, 7.5)])
def test_clocks_may_differ_by_an_eighth_of_a_round_and_at_least_half_a_second(
    round_seconds: float, tolerance: float
) -> None:
    clock = RoundClock(start_seconds=0.0, round_seconds=round_seconds, num_fragments=2)
    assert clock.tolerance_seconds == tolerance
