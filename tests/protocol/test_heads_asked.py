"""Heads are requested from one donor at a time, and from each once while a fragment is replayed."""

from __future__ import annotations

from fetching import NEW, A, B, catch_up, content_of, far_voters, hashed, piece, voices, what_is_fetched
from made import SPAN, head_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.log import SpanHead
from p2p_diloco.protocol.repair.catch_up import CatchUp, HeadsAsked
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import ContentReply, HeadsReply

OTHER = SpanId(0, 1)


def test_one_donor_is_asked_at_a_time_and_the_next_if_it_does_not_answer() -> None:
    heads = HeadsAsked()
    assert heads.may_ask(0, A, 0.0, is_replayed=False)
    heads.ask(0, A, until=1.0)
    assert not heads.may_ask(0, B, 0.5, is_replayed=False)
    assert heads.may_ask(1, B, 0.5, is_replayed=False), "another fragment"
    assert heads.may_ask(0, B, 1.0, is_replayed=False)


def test_a_reply_answers_a_request_once() -> None:
    heads = HeadsAsked()
    assert not heads.take(0, A)
    heads.ask(0, A, until=1.0)
    assert not heads.take(0, B)
    assert not heads.take(1, A)
    assert heads.take(0, A)
    assert not heads.take(0, A)


def test_a_donor_that_answered_is_asked_again_after_the_replay() -> None:
    heads = HeadsAsked()
    heads.ask(0, A, until=1.0)
    assert heads.take(0, A)
    assert not heads.may_ask(0, A, 9.0, is_replayed=True)
    assert heads.may_ask(0, B, 9.0, is_replayed=True), "it may stand higher"
    assert heads.may_ask(0, A, 9.0, is_replayed=False)
    assert heads.may_ask(0, A, 9.0, is_replayed=True), "another replay"


def test_a_forgotten_request_may_be_repeated() -> None:
    heads = HeadsAsked()
    heads.ask(0, A, until=9.0)
    assert heads.take(0, A)
    heads.ask(1, A, until=9.0)
    heads.clear()
    assert heads.may_ask(0, A, 0.0, is_replayed=True)
    assert heads.may_ask(1, A, 0.0, is_replayed=True)


def heard(fetch: CatchUp, donor: PeerId, head: SpanHead) -> bool:
    """Ask a donor, if it may be asked, and record its answer."""
    if not fetch.ask_heads(0, donor, 0.0):
        return False
    reply = HeadsReply(fragment=0, heads=(head,))
    assert fetch.take_heads(donor, reply)
    fetch.note_differences(donor, reply, 0.0)
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
    fetch.entry_absorbed(SPAN, 0.1)
    assert fetch.is_complete()
    fetch.want_entry(SPAN, A)
    assert heard(fetch, A, head_of(height=40, digest=b"40"))


def two_spans() -> tuple[CatchUp, ChainBook]:
    """A `CatchUp` that replays the other span of the fragment, so that donors that answered are not asked again."""
    _, chains = catch_up()
    fetch = CatchUp(far=far_voters((2,)), rules=what_is_fetched(SPAN, OTHER), chains=chains)
    for span in (SPAN, OTHER):
        chains.set_head(span, head_of())
    assert fetch.ask_heads(0, A, 0.0)
    reply = HeadsReply(fragment=0, heads=(NEW, NEW))
    assert fetch.take_heads(A, reply)
    fetch.note_differences(A, reply, 0.0)
    assert not fetch.ask_heads(0, A, 9.0)
    return fetch, chains


def test_entries_that_a_donor_lacks_are_requested_after_the_next_comparison_with_it() -> None:
    fetch, _ = two_spans()
    fetch.pump([A, B], 0.0)
    fetch.entry_absent(A, SPAN, head_of().digest, 0.0)
    assert fetch.ask_heads(0, A, 9.0)


def test_a_span_that_was_fetched_is_compared_with_all_again() -> None:
    fetch, _ = two_spans()
    fetch.want_transfer(SPAN, B)
    fetch.pump([A, B], 0.0)
    fetch.listen_to(voices(B))
    assert hashed(fetch, fetch.take_span(B, piece(), 0.1), 0.1) == []
    fetch.pump([], 0.1)
    said = ((NEW.digest, content_of(b"12345678")), (NEW.digest, content_of(b"other")))
    assert fetch.take_content(B, ContentReply(fragment=0, digests=said), 0.2)
    assert fetch.ask_heads(0, A, 9.0)


def test_a_span_that_was_corrected_is_compared_with_all_again() -> None:
    fetch, _ = two_spans()
    fetch.mend(SPAN, NEW, b"12345678")
    assert fetch.ask_heads(0, A, 9.0)
