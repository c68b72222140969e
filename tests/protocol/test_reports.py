"""Reports of tips: requested from one donor at a time, and from each once while a fragment is replayed."""

from __future__ import annotations

from fetching import NEW, A, B, catch_up, content_of, hashed, mended, piece, quorum
from made import SPAN, head_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.reports import TipReports
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import ContentReply, HeadsReply
from p2p_diloco.span_log import SpanHead

OTHER = SpanId(0, 1)


def may_ask(tips: TipReports, fragment: int, donor: PeerId, now: float, *, is_replayed: bool = False) -> bool:
    return tips.may_ask(fragment, donor, now, now + 1.0, is_replayed=is_replayed)


def test_one_donor_is_asked_at_a_time_and_the_next_if_it_does_not_answer() -> None:
    tips = TipReports()
    assert may_ask(tips, 0, A, 0.0)
    assert not may_ask(tips, 0, B, 0.5)
    assert may_ask(tips, 1, B, 0.5), "another fragment"
    assert may_ask(tips, 0, B, 1.0)


def test_a_reply_answers_a_request_once() -> None:
    tips = TipReports()
    assert not tips.take(0, A)
    assert may_ask(tips, 0, A, 0.0)
    assert not tips.take(0, B)
    assert not tips.take(1, A)
    assert tips.take(0, A)
    assert not tips.take(0, A)


def test_a_donor_that_answered_is_asked_again_after_the_replay() -> None:
    tips = TipReports()
    assert may_ask(tips, 0, A, 0.0)
    assert tips.take(0, A)
    assert not may_ask(tips, 0, A, 9.0, is_replayed=True)
    assert may_ask(tips, 0, B, 9.0, is_replayed=True), "it may have a higher tip"
    assert may_ask(tips, 0, A, 19.0)
    assert may_ask(tips, 0, A, 29.0, is_replayed=True), "another replay"


def test_a_forgotten_request_may_be_repeated() -> None:
    tips = TipReports()
    assert may_ask(tips, 0, A, 0.0)
    assert tips.take(0, A)
    assert may_ask(tips, 1, A, 0.0)
    tips.clear()
    assert may_ask(tips, 0, A, 0.0, is_replayed=True)
    assert may_ask(tips, 1, A, 0.0, is_replayed=True)


def heard(fetch: CatchUp, donor: PeerId, head: SpanHead) -> bool:
    """Ask a donor, if it may be asked, and record its answer."""
    if not fetch.differences.ask_tips(0, donor, 0.0):
        return False
    reply = HeadsReply(fragment=0, heads=(head,))
    assert fetch.differences.take_tips(donor, reply)
    fetch.differences.compare_tips(donor, reply, 0.0)
    return True


def test_a_donor_is_asked_once_while_a_fragment_is_replayed() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heard(fetch, A, NEW)
    assert not heard(fetch, A, NEW)
    assert heard(fetch, B, NEW)


def test_an_entry_missed_during_a_replay_does_not_stop_comparisons() -> None:
    """A donor heard in an earlier replay is asked again; otherwise a sleeper would follow one entry a round forever."""
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heard(fetch, A, NEW)
    fetch.pump([A], 0.0)
    chains.set_head(SPAN, NEW)
    fetch.differences.entry_absorbed(SPAN, 0.1)
    assert fetch.is_complete()
    fetch.fetcher.want_entry(SPAN, A)
    assert heard(fetch, A, head_of(height=40, digest=b"40"))


def two_spans() -> tuple[CatchUp, ChainBook]:
    """A `CatchUp` that replays the other span of the fragment, so that donors that answered are not asked again."""
    fetch, chains = catch_up(SPAN, OTHER)
    for span in (SPAN, OTHER):
        chains.set_head(span, head_of())
    assert fetch.differences.ask_tips(0, A, 0.0)
    reply = HeadsReply(fragment=0, heads=(NEW, NEW))
    assert fetch.differences.take_tips(A, reply)
    fetch.differences.compare_tips(A, reply, 0.0)
    assert not fetch.differences.ask_tips(0, A, 9.0)
    return fetch, chains


def test_entries_that_a_donor_lacks_are_requested_after_the_next_comparison_with_it() -> None:
    fetch, _ = two_spans()
    fetch.pump([A, B], 0.0)
    fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)
    assert fetch.differences.ask_tips(0, A, 9.0)


def test_a_span_that_was_fetched_is_compared_with_all_again() -> None:
    fetch, _ = two_spans()
    fetch.differences.want_span(SPAN, B)
    fetch.pump([A, B], 0.0)
    fetch.quorums.set(quorum(B))
    assert hashed(fetch, fetch.fetcher.take_piece(B, piece(), 0.1), 0.1) == []
    fetch.pump([], 0.1)
    said = ((NEW.digest, content_of(b"12345678")), (NEW.digest, content_of(b"other")))
    assert fetch.verifier.take_content(B, ContentReply(fragment=0, digests=said), 0.2)
    assert fetch.differences.ask_tips(0, A, 9.0)


def test_a_span_that_was_corrected_is_compared_with_all_again() -> None:
    fetch, _ = two_spans()
    assert mended(fetch, head_of())
    assert fetch.differences.ask_tips(0, A, 9.0)
