"""Observations of donors: the size of pieces, silence, and which donors to avoid."""

from __future__ import annotations

import pytest
from made import ids

from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.repair.donors import FIRST_PIECE_BYTES, MISSED_SECONDS, SHUN_SECONDS, Donors
from p2p_diloco.protocol.wire.messages import MOST_PIECE_BYTES

A, B, C = ids(3)


def donors() -> Donors:
    return Donors(quiet_seconds=2.0)


def taught(*seconds: float) -> Donors:
    known = donors()
    for took in seconds:
        size = known.piece_bytes(A)
        known.answered(A, size, size, took)
    return known


@pytest.mark.parametrize(
    ("seconds", "times_first"),
    [((), 1), ((0.1,), 2), ((0.1, 0.1), 4), ((0.1, 1.0), 2), ((0.1, 0.1, 3.0), 2), ((3.0, 3.0), 1)],
)
def test_piece_sizes_follow_their_transfer_times(seconds: tuple[float, ...], times_first: int) -> None:
    assert taught(*seconds).piece_bytes(A) == times_first * FIRST_PIECE_BYTES


def test_pieces_fit_a_frame_and_each_donor_has_its_own_size() -> None:
    known = taught(*[0.1] * 20)
    assert known.piece_bytes(A) == MOST_PIECE_BYTES
    assert known.piece_bytes(B) == FIRST_PIECE_BYTES
    known.lose(A)
    assert known.piece_bytes(A) == FIRST_PIECE_BYTES, "whoever calls again has another line"


def test_only_whole_pieces_of_the_current_size_change_the_size() -> None:
    known = taught(0.1, 0.1)
    known.answered(A, FIRST_PIECE_BYTES, FIRST_PIECE_BYTES, 0.1)
    assert known.piece_bytes(A) == 4 * FIRST_PIECE_BYTES
    known.answered(A, 8 * FIRST_PIECE_BYTES, 8 * FIRST_PIECE_BYTES, 3.0)
    assert known.piece_bytes(A) == 4 * FIRST_PIECE_BYTES
    known.answered(A, 4 * FIRST_PIECE_BYTES, 100, 0.1)
    assert known.piece_bytes(A) == 4 * FIRST_PIECE_BYTES, "a short one would have come quickly over any line"


def test_a_donor_that_stops_answering_while_others_continue_is_quiet() -> None:
    known = taught(0.1)
    known.received(A, 1.0)
    known.received(B, 1.0)
    assert not known.is_quiet(A, 0.0, [A, B], 3.5), "nobody answers: the line has stopped"
    known.received(B, 3.4)
    assert known.is_quiet(A, 0.0, [A, B], 3.5)
    assert not known.is_quiet(A, 3.0, [A, B], 3.5), "asked a moment ago"
    assert not known.is_quiet(A, 0.0, [A, B], 2.9)
    assert not known.is_quiet(B, 0.0, [A, B], 9.0), "it never answered a question for a piece: its line may be thin"


def test_a_slow_donor_gets_more_time() -> None:
    known = taught(1.0)
    known.received(A, 1.0)
    known.received(B, 8.0)
    assert not known.is_quiet(A, 1.0, [A, B], 8.9)
    assert known.is_quiet(A, 1.0, [A, B], 9.1)


def test_no_donor_is_blamed_after_own_sleep() -> None:
    known = taught(0.1)
    known.received(A, 1.0)
    known.look(1.0)
    known.look(60.0)
    known.received(B, 60.1)
    assert not known.is_quiet(A, 0.5, [A, B], 60.2)
    known.look(61.9)
    assert known.is_quiet(A, 0.5, [A, B], 62.1)


def test_a_shunned_donor_is_asked_last_and_reported_once() -> None:
    known = donors()
    (report,) = known.shun(A, "did it", 0.0)
    assert isinstance(report, Report)
    assert report.text.endswith(f"did it; asking others first for {SHUN_SECONDS:.0f} s")
    assert known.shun(A, "did it again", 1.0) == []
    assert list(known.sound([A, B], 2.0)) == [B]
    assert list(known.sound([A], 2.0)) == [A], "some donor is better than none"
    assert list(known.sound([A, B], 2.0 + SHUN_SECONDS)) == [A, B]


def test_a_donor_whose_small_pieces_take_long_gets_no_spans_while_another_is_much_quicker() -> None:
    known = taught(0.1, 0.1)
    assert known.quick([A, B]) == [A, B], "B is not known"
    known.answered(B, FIRST_PIECE_BYTES, FIRST_PIECE_BYTES, 2.5)
    assert known.quick([A, B]) == [A]
    assert known.quick([B]) == [B]
    known.lose(B)
    assert known.quick([A, B]) == [A, B]
    known.answered(B, FIRST_PIECE_BYTES, FIRST_PIECE_BYTES, 0.1)
    assert known.quick([A, B]) == [A, B], "small pieces that come quickly say nothing about larger ones"


def test_others_are_asked_for_entries_first_after_one_did_not_arrive() -> None:
    known = donors()
    assert known.prompt([A, B], 0.0) == [A, B]
    known.missed(A, 1.0)
    assert known.prompt([A, B], 2.0) == [B]
    known.missed(B, 3.0)
    assert known.prompt([A, B], 4.0) == [A, B], "there are no others"
    assert known.prompt([A, B], 1.0 + MISSED_SECONDS) == [A]


def test_a_clock_that_is_set_back_makes_no_donor_slow() -> None:
    known = donors()
    known.answered(A, FIRST_PIECE_BYTES, FIRST_PIECE_BYTES, -60.0)
    assert known.quick([A]) == [A]
    known.answered(B, FIRST_PIECE_BYTES, FIRST_PIECE_BYTES, 0.2)
    assert known.quick([A, B]) == [A, B]
