"""A line says what it carries when it has been full, by the best it has done."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from p2p_diloco.bandwidth.line_rate import (
    JUDGED_ROUNDS,
    MOST_REMEMBERED_ROUNDS,
    REMEMBERED_ROUNDS,
    TRIED_ROUNDS,
    LineRate,
)


def look_on(
    line: LineRate,
    seconds: Sequence[tuple[float, bool]],
    *,
    start: float = 0.0,
    sent: float = 0.0,
    round_index: int = 0,
) -> float:
    """Let seconds pass, each with what was read in it and whether more waited at its end; return all that was read."""
    read_at = start
    line.look(start, round_index, sent, read_at, is_waiting=seconds[0][1])
    for number, (more, is_waiting) in enumerate(seconds, 1):
        sent, read_at = sent + more, start + number if more else read_at
        line.look(start + number, round_index, sent, read_at, is_waiting=is_waiting)
    return sent


def test_a_line_that_was_never_full_says_nothing() -> None:
    line = LineRate()
    assert line.bytes_per_second() is None
    look_on(line, [(5e6, False), (0.0, False)] * 10)
    assert line.bytes_per_second() is None


def test_a_line_that_was_full_for_a_window_says_what_it_carried_then() -> None:
    line = LineRate()
    look_on(line, [(1e6, True)] * 10)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_a_line_that_is_full_for_less_than_a_window_says_nothing() -> None:
    line = LineRate()
    look_on(line, [(1e6, True), (1e6, True), (0.0, False)] * 5)
    assert line.bytes_per_second() is None


def test_one_who_does_not_read_makes_no_thin_line_of_it() -> None:
    """The others had theirs at once, and that nothing comes any more is no rate at which a line carries anything."""
    line = LineRate()
    look_on(line, [(30e6, True), *[(0.0, True)] * 10])
    assert line.bytes_per_second() is None


def test_an_outage_is_no_thin_line() -> None:
    line = LineRate()
    look_on(line, [(1e6, True)] * 5 + [(0.0, True)] * 5 + [(1e6, True)] * 5)
    assert line.bytes_per_second() == pytest.approx(1e6)


@pytest.mark.parametrize("seconds", [0.4, 1.4, 3.3, 32.0])
@pytest.mark.parametrize("links", [1, 3])
def test_long_vectors_that_come_one_by_one_show_the_rate_at_which_they_come(seconds: float, links: int) -> None:
    line, looks = LineRate(), 0
    for now in range(200):
        come = int(now / seconds) // links * links  # those that share the line all come when it has carried as many
        line.look(float(now), now // 60, 1e6 * come, come * seconds, is_waiting=True)
        looks += line.bytes_per_second() is not None
        if line.bytes_per_second() is not None:
            assert line.bytes_per_second() == pytest.approx(1e6 / seconds)
    assert looks > 0


def test_a_burst_after_a_pause_is_not_spread_over_the_pause() -> None:
    line = LineRate()
    line.look(0.0, 0, 5e6, 0.0, is_waiting=False)
    for second in range(1, 8):
        line.look(100.0 + second, 1, 5e6 + 1e6 * second, 100.0 + second, is_waiting=True)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_after_many_rounds_in_which_it_was_not_full_it_is_forgotten() -> None:
    line = LineRate()
    sent = look_on(line, [(1e6, True)] * 5, round_index=3)
    for later in range(4, 3 + REMEMBERED_ROUNDS):
        sent = look_on(line, [(1e3, False)] * 5, start=100.0 * later, sent=sent, round_index=later)
        assert line.bytes_per_second() == pytest.approx(1e6)
    look_on(line, [(1e3, False)] * 5, start=1e5, sent=sent, round_index=3 + REMEMBERED_ROUNDS)
    assert line.bytes_per_second() is None


def play(line: LineRate, begin: int, rounds: int, thin: bool) -> list[int]:
    """Let rounds pass on a line that fills whenever all is sent, if it is thin; return when that was tried anew."""
    tried = []
    for index in range(begin, begin + rounds):
        is_full = thin and line.bytes_per_second() is None
        look_on(
            line, [(1e6 if is_full else 1e3, is_full)] * 5, start=100.0 * index, sent=1e9 * index, round_index=index
        )
        tried += [index] if is_full else []
    return tried


def test_a_line_that_stays_thin_is_tried_ever_less_often() -> None:
    tried = play(LineRate(), 0, 400, thin=True)
    assert [later - before for before, later in pairwise(tried)] == [
        17,
        33,
        *[65] * 5,
    ]  # it is forgotten in the last round before
    assert (REMEMBERED_ROUNDS, MOST_REMEMBERED_ROUNDS) == (16, 64)


def test_a_line_that_was_wide_for_long_and_turns_thin_is_tried_soon_again() -> None:
    line = LineRate()
    play(line, 0, 60, thin=True)
    play(line, 60, 200, thin=False)
    tried = play(line, 260, 60, thin=True)
    assert [later - before for before, later in pairwise(tried)] == [17, 33]


def test_the_share_of_averaging_follows_when_a_line_was_tried_for_some_rounds() -> None:
    line = LineRate()
    play(line, 0, 1, thin=True)
    play(line, 1, REMEMBERED_ROUNDS, thin=False)
    assert line.bytes_per_second() is None
    assert line.bytes_per_second_to_share() == pytest.approx(1e6)
    play(line, 1 + REMEMBERED_ROUNDS, TRIED_ROUNDS, thin=False)
    assert line.bytes_per_second_to_share() is None


def test_a_line_that_turns_thin_or_wide_shows_it_in_a_few_full_rounds() -> None:
    line, sent = LineRate(), 0.0
    for round_index, rate in enumerate([8e6] * 3 + [1e6] * (1 + JUDGED_ROUNDS) + [3e6]):
        sent = look_on(line, [(rate, True)] * 8, start=8.0 * round_index, sent=sent, round_index=round_index)
        if round_index == 3 + JUDGED_ROUNDS:
            assert line.bytes_per_second() == pytest.approx(1e6)
    assert line.bytes_per_second() == pytest.approx(3e6)


def test_looks_that_come_late_take_the_time_that_was() -> None:
    line = LineRate()
    for number in range(5):
        line.look(2.0 * number, 0, 2e6 * number, 2.0 * number, is_waiting=True)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_what_was_not_looked_at_for_long_says_nothing() -> None:
    """The machine slept: what waited before and after need not have waited all the while."""
    line = LineRate()
    for number in range(5):
        line.look(40.0 * number, number, 2e6 * number, 40.0 * number, is_waiting=True)
    assert line.bytes_per_second() is None
