"""Contents compared with others: agreement, accusations, and when the disk or a majority decides."""

from __future__ import annotations

from fetching import quorum, what_is_fetched
from made import SPAN, ids

from p2p_diloco.ids import sha256
from p2p_diloco.protocol.actions import CompareContent
from p2p_diloco.protocol.repair.scrub import Scrub
from p2p_diloco.protocol.wire.messages import ContentReply

A, B, C = ids(3)
D = sha256(b"chain")
ALL = quorum(A, B, C)


def scrub() -> Scrub:
    return Scrub(rules=what_is_fetched(SPAN))


def reply(content: bytes) -> ContentReply:
    return ContentReply(fragment=0, digests=((D, sha256(content)),))


def say(page: Scrub, peer: object, content: bytes, now: float = 0.0) -> tuple[list[object], list[object]]:
    """Let a peer's reply show that it differs."""
    assert page.may_ask(0, peer, now)  # type: ignore[arg-type]
    assert isinstance(page.take(peer, reply(content)), CompareContent)  # type: ignore[arg-type]
    return page.compared(peer, 0, 0, [SPAN], now, ALL)  # type: ignore[arg-type,return-value]


def test_two_witnesses_verify() -> None:
    page = scrub()
    assert page.take(A, reply(b"")) is None, "nobody asked"
    for peer in (A, B):
        assert page.may_ask(0, peer, 0.0)
        assert not page.may_ask(0, peer, 0.1)
        assert page.take(peer, reply(b"")) is not None
        assert not page.is_verified([A, B])
        assert page.compared(peer, 0, 1, [], 0.2, ALL) == ([], [])
    assert page.is_verified([A, B, C])
    assert not page.may_ask(0, C, 0.3)
    page.begin_again()
    assert not page.is_verified([A])
    assert page.is_verified([])


def test_the_first_difference_triggers_a_disk_check_and_an_agreeing_majority_overrules_it() -> None:
    page = scrub()
    assert say(page, A, b"x") == ([SPAN], [])
    assert not page.may_ask(0, A, 5.0), "not again for a while"
    assert page.may_ask(0, A, 9.0)
    assert say(page, B, b"x") == ([], [])
    assert page.rebuilt(SPAN)
    assert not page.rebuilt(SPAN)
    assert page.overrulers(SPAN, ALL) == sorted([A, B])
    assert say(page, C, b"z") == ([], [SPAN])


def test_two_accusers_that_differ_from_each_other_overrule_nothing() -> None:
    page = scrub()
    say(page, A, b"x")
    page.rebuilt(SPAN)
    assert say(page, B, b"y") == ([], [])
    assert page.accusers(SPAN) == sorted([A, B])
    assert say(page, C, b"y") == ([], [SPAN])


def test_a_reply_too_short_to_cover_a_span_is_still_a_difference() -> None:
    page = scrub()
    assert page.may_ask(0, A, 0.0)
    page.take(A, ContentReply(fragment=0, digests=()))
    assert page.compared(A, 0, 0, [SPAN], 0.0, ALL) == ([SPAN], [])


def test_replies_about_replaced_bytes_are_dropped() -> None:
    page = scrub()
    say(page, A, b"x")
    page.moved(SPAN)
    assert page.accusers(SPAN) == []
    assert not page.rebuilt(SPAN), "the answer is about the bytes of before"


def test_a_span_that_advanced_is_checked_again() -> None:
    page = scrub()
    say(page, A, b"x")
    page.forget_rebuild(SPAN)
    assert say(page, A, b"x", 9.0) == ([SPAN], [])


def test_a_difference_in_two_scrubs_is_unsettled() -> None:
    page = scrub()
    say(page, A, b"x")
    assert not page.is_unsettled(SPAN)
    page.begin_again()
    assert page.is_unsettled(SPAN)
    assert say(page, A, b"x") == ([SPAN], [])
    page.moved(SPAN)
    page.begin_again()
    assert not page.is_unsettled(SPAN)


def test_a_former_donor_is_no_longer_a_witness() -> None:
    scrub = Scrub(rules=what_is_fetched(SPAN))
    scrub.compared(A, 0, 1, (), 0.0, ALL)
    assert scrub.is_verified([A])
    assert not scrub.is_verified([A, B])
    scrub.limit_to([B])
    assert not scrub.is_verified([B])
    scrub.compared(B, 0, 1, (), 0.0, ALL)
    assert scrub.is_verified([B])


def test_neither_two_of_five_nor_incomplete_replies_are_a_majority() -> None:
    page = scrub()
    for peer in (A, B):
        assert page.may_ask(0, peer, 0.0)
        page.take(peer, ContentReply(fragment=0, digests=()))
        page.compared(peer, 0, 0, [SPAN], 0.0, ALL)
    assert page.overrulers(SPAN, ALL) == []
    page = scrub()
    say(page, A, b"x")
    say(page, B, b"x")
    assert page.overrulers(SPAN, quorum(A, B, C, needed=3)) == []


def test_a_peer_that_differed_is_asked_at_once_if_all_contents_must_be_known() -> None:
    page = scrub()
    assert not page.is_contested(0)
    say(page, A, b"x")
    assert page.is_contested(0)
    assert not page.may_ask(0, A, 3.0)
    page.ask_again(0)
    assert page.may_ask(0, A, 3.0)


def test_an_answer_about_tips_ahead_is_compared_once_they_are_reached() -> None:
    page = scrub()
    assert page.may_ask(0, A, 0.0)
    question = page.take(A, reply(b""))
    assert question is not None
    page.keep(question, 1.0)
    assert page.is_ahead(A, 8.9)
    assert not page.is_ahead(A, 9.1), "this peer has gone past it, or is too slow"
    assert not page.is_ahead(B, 8.9)
    assert page.due(0, [sha256(b"an earlier tip")]) == []
    assert page.due(1, [D]) == []
    assert page.due(0, [D]) == [question]
    assert page.due(0, [D]) == [], "once is enough"
    assert page.compared(A, 0, 1, [], 3.0, ALL) == ([], [])
    assert page.is_verified([A])


def test_a_repeated_answer_of_the_disk_does_not_let_it_be_asked_again() -> None:
    page = scrub()
    assert say(page, A, b"one") == ([SPAN], [])
    assert page.rebuilt(SPAN)
    page.forget_rebuild(SPAN)
    assert say(page, B, b"other") == ([], [])
