"""The number of requests under way follows what the line can carry."""

from __future__ import annotations

from p2p_diloco.protocol.window import Window


def test_quick_answers_make_room_for_more_up_to_the_most() -> None:
    window = Window(seconds=8.0, grows=False, most=6)
    assert window.size == 4
    for expected in (5, 6, 6):
        window.answered(1.0)
        assert window.size == expected


def test_slow_answers_and_none_at_all_leave_one() -> None:
    window = Window(seconds=8.0, grows=False, most=6)
    window.answered(3.0)
    assert window.size == 4, "neither quick nor slow"
    window.answered(5.0)
    assert window.size == 2
    for _ in range(9):
        window.unanswered()
        window.answered(7.0)
        assert window.size >= 1
    assert window.size == 1


def test_patience_grows_with_what_answers_take_only_where_it_may() -> None:
    patient, strict = (Window(seconds=8.0, grows=grows, most=6) for grows in (True, False))
    for window in (patient, strict):
        assert window.seconds == 8.0
        for _ in range(30):
            window.answered(6.0)
    assert 23.0 < patient.seconds <= 24.0
    assert strict.seconds == 8.0
