"""The amount requested at once from each donor: pieces that follow the line, and donors that fell silent."""

from __future__ import annotations

from dataclasses import replace

from fetching import NEW, A, B, C, catch_up
from made import SPAN

from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.actions import Action, Report, Send
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.wire.messages import SpanReply, SpanRequest
from p2p_diloco.span_log import SpanHead

STATE_BYTES = 1 << 24


def large(*spans: SpanId) -> CatchUp:
    """Return a `CatchUp` that fetches spans of many pieces."""
    page, _ = catch_up(*spans, span_bytes=STATE_BYTES)
    page.fetcher.want_everything()
    return page


def answer(send: Action, head: SpanHead = NEW) -> SpanReply:
    """Return everything that a request asks for."""
    assert isinstance(send, Send)
    asked_for = send.message
    assert isinstance(asked_for, SpanRequest)
    body = bytes(asked_for.most_bytes)
    return SpanReply(span=asked_for.span, head=head, total_bytes=STATE_BYTES, offset=asked_for.offset, piece=body)


def test_pieces_grow_while_they_come_quickly_and_shrink_when_they_do_not() -> None:
    page, now, sizes = large(SPAN), 0.0, []
    (send,) = page.pump([A], now)
    for took in (0.1, 0.1, 0.1, 3.0, 1.0):
        now += took
        (send,) = page.fetcher.take_piece(A, answer(send), now)
        assert isinstance(send, Send)
        assert isinstance(send.message, SpanRequest)
        sizes.append(send.message.most_bytes >> 16)
    assert sizes == [2, 4, 8, 4, 4]


def test_a_donor_that_stops_while_others_answer_is_replaced_early_and_its_pieces_are_kept() -> None:
    page = large(SPAN, SpanId(0, 1))
    sends = {send.to: send for send in page.pump([A, B], 0.0) if isinstance(send, Send)}
    assert set(sends) == {A, B}
    for tenth in range(1, 11):
        for donor in (A, B) if tenth == 1 else (B,):
            page.fetcher.received(donor, tenth / 10)
            (following,) = page.fetcher.take_piece(donor, answer(sends[donor]), tenth / 10)
            assert isinstance(following, Send)
            sends[donor] = following
        actions = page.pump([A, B], tenth / 10)
        assert (actions == []) is (tenth < 10)
    report, again = actions
    assert isinstance(report, Report)
    assert "served nothing" in report.text
    assert isinstance(again, Send)
    assert isinstance(again.message, SpanRequest)
    assert isinstance(sends[A].message, SpanRequest)
    assert again.to == B
    assert again.message.span == sends[A].message.span
    assert again.message.offset == sends[A].message.offset > 0


def test_no_donor_is_replaced_early_if_none_answers() -> None:
    page = large(SPAN, SpanId(0, 1))
    sends = {send.to: send for send in page.pump([A, B], 0.0) if isinstance(send, Send)}
    for donor in (A, B):
        page.fetcher.received(donor, 0.1)
        page.fetcher.take_piece(donor, answer(sends[donor]), 0.1)
    assert page.pump([A, B], 0.2) == []
    assert page.pump([A, B], 0.9) == []
    assert page.pump([A, B], 1.9) == [], "the line may be what has stopped"


def test_a_donor_has_a_bounded_number_of_pending_pieces() -> None:
    page = large(*(SpanId(0, index) for index in range(40)))
    sends = page.pump([A, B, C], 0.0)
    assert len(sends) == 4, "the window is what a line is trusted with at first"
    for index in range(80):
        donor = [A, B, C][index % 3]
        mine = [send for send in sends if isinstance(send, Send) and send.to == donor]
        page.fetcher.received(donor, 0.1)
        if mine:
            sends.remove(mine[0])
            sends += page.fetcher.take_piece(donor, answer(mine[0]), 0.1) + page.pump([A, B, C], 0.1)
    under_way = [send.to for send in sends if isinstance(send, Send)]
    assert [under_way.count(donor) for donor in (A, B, C)] == [8, 8, 8]


def test_a_former_donor_cannot_undo_what_another_donor_sends() -> None:
    page = large(SPAN)
    (asked,) = page.pump([B], 0.0)
    page.fetcher.lose(B)
    (send,) = page.pump([A], 0.1)
    bad = replace(answer(asked), offset=STATE_BYTES)
    for tenth in range(2, 9):
        (send,) = page.fetcher.take_piece(A, answer(send), tenth / 10)
        page.fetcher.take_piece(B, bad, tenth / 10)
    assert isinstance(send, Send)
    assert isinstance(send.message, SpanRequest)
    assert send.message.offset > 0, "B was asked, and sends what does not fit whenever it likes"
