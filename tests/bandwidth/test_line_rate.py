"""A line shows its rate while it is full; the best rate seen counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest

from p2p_diloco.bandwidth.uplink import (
    GROWTH,
    JUDGED_ROUNDS,
    MOST_GROWTH,
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
    """Let seconds pass, each with its bytes read and whether more waited at its end; return the total read."""
    read_at = start
    line.look(start, round_index, sent, read_at, is_waiting=seconds[0][1])
    for number, (more, is_waiting) in enumerate(seconds, 1):
        sent, read_at = sent + more, start + number if more else read_at
        line.look(start + number, round_index, sent, read_at, is_waiting=is_waiting)
    return sent


def test_a_line_that_was_never_full_has_no_rate() -> None:
    line = LineRate()
    assert line.bytes_per_second() is None
    look_on(line, [(5e6, False), (0.0, False)] * 10)
    assert line.bytes_per_second() is None


def test_a_line_that_was_full_for_a_window_has_the_rate_of_that_window() -> None:
    line = LineRate()
    look_on(line, [(1e6, True)] * 10)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_a_line_that_is_full_for_less_than_a_window_has_no_rate() -> None:
    line = LineRate()
    look_on(line, [(1e6, True), (1e6, True), (0.0, False)] * 5)
    assert line.bytes_per_second() is None


def test_a_peer_that_does_not_read_does_not_make_the_line_thin() -> None:
    """The others received theirs at once. A line on which nothing moves any more shows no rate."""
    line = LineRate()
    look_on(line, [(30e6, True), *[(0.0, True)] * 10])
    assert line.bytes_per_second() is None


def test_an_outage_does_not_make_the_line_thin() -> None:
    line = LineRate()
    look_on(line, [(1e6, True)] * 5 + [(0.0, True)] * 5 + [(1e6, True)] * 5)
    assert line.bytes_per_second() == pytest.approx(1e6)


@pytest.mark.parametrize("seconds", [0.4, 1.4, 3.3, 32.0])
@pytest.mark.parametrize("links", [1, 3])
def test_long_vectors_that_arrive_one_by_one_show_their_rate(seconds: float, links: int) -> None:
    line, looks = LineRate(), 0
    for now in range(200):
        come = int(now / seconds) // links * links  # vectors that share the line all arrive together
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


def test_a_rate_is_forgotten_after_many_rounds_in_which_the_line_was_not_full() -> None:
    line = LineRate()
    sent = look_on(line, [(1e6, True)] * 5, round_index=3)
    for later in range(4, 3 + REMEMBERED_ROUNDS):
        sent = look_on(line, [(1e3, False)] * 5, start=100.0 * later, sent=sent, round_index=later)
        assert line.bytes_per_second() == pytest.approx(1e6)
    look_on(line, [(1e3, False)] * 5, start=1e5, sent=sent, round_index=3 + REMEMBERED_ROUNDS)
    assert line.bytes_per_second() is None


def play(line: LineRate, begin: int, rounds: int, thin: bool) -> list[int]:
    """Let rounds pass on a line that, if thin, fills whenever all is sent; return the rounds in which all was sent."""
    tried = []
    for index in range(begin, begin + rounds):
        is_full = thin and line.bytes_per_second() is None
        look_on(
            line, [(1e6 if is_full else 1e3, is_full)] * 5, start=100.0 * index, sent=1e9 * index, round_index=index
        )
        tried += [index] if is_full else []
    return tried


def test_a_line_that_stays_thin_is_probed_less_and_less_often() -> None:
    tried = play(LineRate(), 0, 400, thin=True)
    assert [later - before for before, later in pairwise(tried)] == [
        17,
        33,
        *[65] * 5,
    ]  # it is forgotten in the round before
    assert (REMEMBERED_ROUNDS, MOST_REMEMBERED_ROUNDS) == (16, 64)


def test_a_line_that_was_wide_for_long_and_turns_thin_is_probed_again_soon() -> None:
    line = LineRate()
    play(line, 0, 60, thin=True)
    play(line, 60, 200, thin=False)
    tried = play(line, 260, 60, thin=True)
    assert [later - before for before, later in pairwise(tried)] == [17, 33]


def test_the_averaging_share_is_restored_some_rounds_after_a_probe() -> None:
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


def test_more_is_tried_in_each_round_after_saturation() -> None:
    line, sent = LineRate(), 0.0
    assert line.bytes_per_second_to_try() is None
    for round_index in range(REMEMBERED_ROUNDS):
        is_full = round_index == 0
        seconds = [(1e6 if is_full else 1e3, is_full)] * 5
        sent = look_on(line, seconds, start=100.0 * round_index, sent=sent, round_index=round_index)
        steps = [1.0, GROWTH, GROWTH**2, *[MOST_GROWTH] * REMEMBERED_ROUNDS]
        assert line.bytes_per_second_to_try() == pytest.approx(1e6 * math.prod(steps[: round_index + 1]))
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_a_corrected_clock_does_not_make_a_peer_try_much_more() -> None:
    line = LineRate()
    sent = look_on(line, [(1e6, True)] * 5, round_index=0)
    look_on(line, [(1e3, False)] * 5, start=100.0, sent=sent, round_index=REMEMBERED_ROUNDS - 1)
    assert line.bytes_per_second_to_try() == pytest.approx(1e6 * GROWTH), "that of one round, not of fifteen"


def test_late_looks_use_the_time_that_passed() -> None:
    line = LineRate()
    for number in range(5):
        line.look(2.0 * number, 0, 2e6 * number, 2.0 * number, is_waiting=True)
    assert line.bytes_per_second() == pytest.approx(1e6)


def test_a_line_that_was_not_looked_at_for_long_has_no_rate() -> None:
    """The machine slept: vectors that waited before and after need not have waited throughout."""
    line = LineRate()
    for number in range(5):
        line.look(40.0 * number, number, 2e6 * number, 40.0 * number, is_waiting=True)
    assert line.bytes_per_second() is None
