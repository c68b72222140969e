"""The number of pending requests follows what the line can carry."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.repair.donors import LONGEST_PATIENCE, MOST_REQUESTS, Window, least_loaded


def window() -> Window:
    return Window(seconds=8.0, target_seconds=2.0)


def test_quick_answers_widen_the_window_up_to_the_maximum() -> None:
    line = window()
    assert line.size == 4
    for expected in (*range(5, MOST_REQUESTS + 1), MOST_REQUESTS):
        line.answered(1.0)
        assert line.size == expected


def test_slow_or_missing_answers_narrow_the_window_to_two() -> None:
    line = window()
    line.answered(3.0)
    assert line.size == 4, "neither quick nor slow"
    line.answered(5.0)
    assert line.size == 2
    for _ in range(9):
        line.unanswered()
        line.answered(7.0)
        assert line.size == 2


def test_a_long_line_is_not_a_thin_one() -> None:
    line = Window(seconds=8.0, target_seconds=2.0, leaves_out_way=True)
    for expected in range(5, 9):
        line.answered(5.0)
        assert line.size == expected
    line.answered(11.5)
    assert line.size == 9, "a lost packet takes another way there and back"
    line.answered(14.5)
    assert line.size == 6, "this answer has waited behind others for more than four seconds"


def test_the_timeout_grows_with_the_answer_time() -> None:
    line = window()
    assert line.seconds == 8.0
    for _ in range(30):
        line.answered(1.0)
    assert line.seconds == 8.0
    for _ in range(30):
        line.answered(15.0)
    assert 29.0 < line.seconds <= 30.0


def test_an_answer_of_a_lossy_line_may_take_twenty_seconds_however_short_the_rounds() -> None:
    """Entries were asked for again after six seconds, so that a joiner's line carried each of them twice."""
    line = Window(seconds=1.5, target_seconds=1.5, leaves_out_way=True)
    assert line.longest_seconds == 20.0
    for _ in range(30):
        line.answered(10.0)
    assert line.seconds > 19.0


def test_an_overlong_answer_counts_as_the_maximum() -> None:
    line = window()
    for _ in range(30):
        line.answered(1000.0)
    assert line.seconds == LONGEST_PATIENCE * 8.0
    for _ in range(30):
        line.answered(1.0)
    assert line.seconds == 8.0


def test_a_span_is_requested_from_the_donor_with_fewest_requests() -> None:
    donors = [PeerId(bytes([number, 255 - number]) * 16) for number in (20, 90, 201)]
    assert least_loaded(SpanId(0, 0), donors, {donors[0]: 2, donors[1]: 1, donors[2]: 2}) == donors[1]
    alike = dict.fromkeys(donors, 1)
    chosen = {least_loaded(SpanId(0, 0), order, alike) for order in (donors, donors[::-1])}
    assert len(chosen) == 1, "the same one on every machine"
