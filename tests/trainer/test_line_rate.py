"""A line says what it carries when it has been full, by the best it has done."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2p_diloco.trainer.line_rate import REMEMBERED_ROUNDS, WINDOW_SECONDS, LineRate


def look_on(
    line: LineRate,
    seconds: Sequence[tuple[float, bool]],
    *,
    start: float = 0.0,
    sent: float = 0.0,
    round_index: int = 0,
) -> float:
    """Let seconds pass, each with what was sent in it and whether more waited at its end; return all that was sent."""
    line.look(start, round_index, sent, is_waiting=seconds[0][1])
    for number, (more, is_waiting) in enumerate(seconds, 1):
        sent += more
        line.look(start + number, round_index, sent, is_waiting=is_waiting)
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
    """The others had theirs at once: that is what the line carries at least."""
    line = LineRate()
    look_on(line, [(30e6, True), *[(0.0, True)] * 10])
    assert line.bytes_per_second() == pytest.approx(30e6 / WINDOW_SECONDS)


def test_after_many_rounds_in_which_it_was_not_full_it_is_forgotten() -> None:
    line = LineRate()
    sent = look_on(line, [(1e6, True)] * 5, round_index=3)
    for later in range(4, 3 + REMEMBERED_ROUNDS):
        sent = look_on(line, [(1e3, False)] * 5, start=100.0 * later, sent=sent, round_index=later)
        assert line.bytes_per_second() == pytest.approx(1e6)
    look_on(line, [(1e3, False)] * 5, start=1e5, sent=sent, round_index=3 + REMEMBERED_ROUNDS)
    assert line.bytes_per_second() is None


def test_looks_that_come_late_take_the_time_that_was() -> None:
    line = LineRate()
    for number in range(5):
        line.look(2.0 * number, 0, 2e6 * number, is_waiting=True)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_what_was_not_looked_at_for_long_says_nothing() -> None:
    """The machine slept: what waited before and after need not have waited all the while."""
    line = LineRate()
    for number in range(5):
        line.look(40.0 * number, number, 2e6 * number, is_waiting=True)
    assert line.bytes_per_second() is None
