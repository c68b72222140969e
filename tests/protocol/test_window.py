"""The number of requests under way follows what the line can carry."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.repair.window import LONGEST_PATIENCE, MOST_ASKED, Window, least_loaded


def window() -> Window:
    return Window(seconds=8.0, target_seconds=2.0)


def test_quick_answers_make_room_for_more_up_to_the_most() -> None:
    line = window()
    assert line.size == 4
    for expected in (*range(5, MOST_ASKED + 1), MOST_ASKED):
        line.answered(1.0)
        assert line.size == expected


def test_slow_answers_and_none_at_all_leave_two() -> None:
    line = window()
    line.answered(3.0)
    assert line.size == 4, "neither quick nor slow"
    line.answered(5.0)
    assert line.size == 2
    for _ in range(9):
        line.unanswered()
        line.answered(7.0)
        assert line.size == 2


def test_patience_grows_with_what_answers_take() -> None:
    line = window()
    assert line.seconds == 8.0
    for _ in range(30):
        line.answered(1.0)
    assert line.seconds == 8.0
    for _ in range(30):
        line.answered(15.0)
    assert 29.0 < line.seconds <= 30.0


def test_an_answer_that_took_longer_than_any_may_teaches_no_more_than_that() -> None:
    line = window()
    for _ in range(30):
        line.answered(1000.0)
    assert line.seconds == LONGEST_PATIENCE * 8.0
    for _ in range(30):
        line.answered(1.0)
    assert line.seconds == 8.0


def test_a_span_is_asked_of_who_is_asked_for_least() -> None:
    donors = [PeerId(bytes([number, 255 - number]) * 16) for number in (20, 90, 201)]
    assert least_loaded(SpanId(0, 0), donors, {donors[0]: 2, donors[1]: 1, donors[2]: 2}) == donors[1]
    alike = dict.fromkeys(donors, 1)
    chosen = {least_loaded(SpanId(0, 0), order, alike) for order in (donors, donors[::-1])}
    assert len(chosen) == 1, "the same one on every machine"
