"""Swarm time, rounds and cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.protocol.clock import LEAD_TURNS, RoundClock, middle_two

CLOCK = RoundClock(start_seconds=1000.0, round_seconds=10.0, num_fragments=4)


def clock_with(round_seconds: float, num_fragments: int) -> RoundClock:
    return RoundClock(start_seconds=1000.0, round_seconds=round_seconds, num_fragments=num_fragments)


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


@given(st.integers(0, 3), st.floats(1000.0, 5000.0))
def test_a_closed_round_is_the_last_of_its_fragment_that_is_over(fragment: int, now: float) -> None:
    closed = CLOCK.closed_round(fragment, now)
    assert closed < CLOCK.round_at(now) <= closed + 4
    assert closed % 4 == fragment


@pytest.mark.parametrize(
    ("round_seconds", "turn_seconds"), [(0.5, 0.5), (1.5, 1.5), (2.05, 1.5), (6.0, 1.5), (8.0, 2.0), (60.0, 15.0)]
)
def test_a_turn_is_a_quarter_of_a_round_and_as_long_as_a_ballot_takes(
    round_seconds: float, turn_seconds: float
) -> None:
    assert clock_with(round_seconds, 4).turn_seconds == turn_seconds


@given(st.floats(0.2, 100.0), st.integers(1, 8), st.integers(1, 10_000))
def test_a_decision_has_two_turns_to_spread_before_a_round_under_it_begins(
    round_seconds: float, num_fragments: int, ballot: int
) -> None:
    clock = clock_with(round_seconds, num_fragments)
    begin = clock.start_seconds + (ballot - 1) * clock.turn_seconds
    assert clock.ballot_at(begin + clock.turn_seconds / 2) == ballot
    round_index = clock.ballot_round(ballot)
    assert clock.begin(round_index) - 1e-3 <= begin < clock.begin(round_index + 1) + 1e-3
    first_governed = clock.begin(clock.agreed_in(ballot) + 1)
    spread = begin + 2 * clock.turn_seconds
    assert spread - 1e-3 <= first_governed < spread + round_seconds
    assert clock.agreed_in(ballot) <= clock.agreed_in(ballot + 1)


@given(st.floats(0.2, 100.0), st.integers(1, 8), st.integers(0, 1000))
def test_a_roster_is_voted_on_in_each_cycle(round_seconds: float, num_fragments: int, cycle: int) -> None:
    clock = clock_with(round_seconds, num_fragments)
    end = clock.begin((cycle + 1) * num_fragments)
    assert clock.ends_cycle(clock.ballot_at(end - round_seconds / 2))


@given(
    st.sampled_from([0.5, 1.0, 1.5, 2.05, 2.74, 3.0, 4.5, 5.0, 6.0, 8.0, 60.0]), st.integers(1, 8), st.integers(0, 99)
)
def test_the_ballots_of_a_vote_have_leaders_of_all_kinds(round_seconds: float, num_fragments: int, cycle: int) -> None:
    clock = clock_with(round_seconds, num_fragments)
    begin = clock.ballot_at(clock.begin(cycle * num_fragments) + 0.01)
    due = [ballot for ballot in range(begin, begin + 40 * num_fragments) if clock.ends_cycle(ballot)]
    assert {clock.lead_turn(ballot) for ballot in due[: 2 * LEAD_TURNS]} == set(range(LEAD_TURNS))


@pytest.mark.parametrize("turn", range(4))
def test_in_long_rounds_a_roster_is_voted_on_in_the_quarters_of_the_last_round_of_a_cycle(turn: int) -> None:
    begin = CLOCK.begin(7) + turn * 2.5
    assert CLOCK.ends_cycle(CLOCK.ballot_at(begin + 0.1))
    assert not CLOCK.ends_cycle(CLOCK.ballot_at(begin - 10.0 + 0.1))
    assert CLOCK.agreed_in(CLOCK.ballot_at(begin + 0.1)) == (7 if turn < 3 else 8)


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
