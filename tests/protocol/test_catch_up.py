"""Catching up: what is requested from which peer, and what answers may do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TypeGuard

import pytest
from fake_run import peer_id
from fetching import (
    NEW,
    A,
    B,
    C,
    catch_up,
    content_of,
    differing,
    fetched,
    hashed,
    mended,
    piece,
    question,
    quorum,
    vouched,
)
from made import SPAN, book_with, entry_on, founding, head_of, ids, roster_1

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.actions import Action, HashSpan, RebuildParent, ReplaceSpan, Report, Send
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.differences import NEARLY_LEVEL
from p2p_diloco.protocol.repair.donors import LONGEST_ANSWER_SECONDS
from p2p_diloco.protocol.repair.reports import MOST_FORMER
from p2p_diloco.protocol.results import ParentRebuilt, SpanHashed
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryRequest,
    HeadsReply,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.span_log import SpanHead


def test_a_piece_that_arrives_after_a_branch_was_given_up_changes_nothing() -> None:
    page, _ = catch_up()
    page.fetcher.want_everything()
    page.pump([A], 0.0)
    page.adopt()
    assert page.fetcher.take_piece(A, piece(), 0.1) == []


def asked(actions: list[Action]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_a_newcomer_fetches_each_span_in_pieces() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    assert not fetch.is_complete()
    assert isinstance(asked(fetch.pump([A], 0.0))[0], SpanRequest)
    assert fetch.pump([A], 0.1) == []
    (following,) = asked(fetch.fetcher.take_piece(A, piece(body=b"1234"), 0.2))
    assert following == question(4)
    (replaced,) = fetched(fetch, A, piece(4, b"5678"), 0.3, state=b"12345678")
    assert replaced == ReplaceSpan(span=SPAN, head=NEW, state=b"12345678")
    assert chains.heads[SPAN] == NEW
    assert fetch.is_complete()


@pytest.mark.parametrize("behind", [1, NEARLY_LEVEL, NEARLY_LEVEL + 1])
def test_a_joiner_is_nearly_level_once_it_holds_all_spans_and_lacks_few_entries(behind: int) -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    assert not fetch.differences.is_nearly_level(), "it holds nothing"
    fetch.pump([A], 0.0)
    fetched(fetch, A, piece(), 0.1, state=b"12345678")
    assert fetch.differences.is_nearly_level()
    heads(fetch, A, head_of(height=NEW.height + behind, digest=b"later"), 0.2)
    assert fetch.differences.is_nearly_level() == (behind <= NEARLY_LEVEL)
    chains.set_head(SPAN, head_of(height=NEW.height + 1, digest=b"next"))
    assert fetch.differences.is_nearly_level()
    fetch.adopt()
    assert not fetch.differences.is_nearly_level(), "its spans are those of another branch"


def test_an_unanswered_request_goes_to_another_donor() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    (second,) = fetch.pump([B], 3.0)
    assert isinstance(second, Send)
    assert second.to == B
    fetch.fetcher.lose(A)
    assert fetch.pump([A, B], 3.1) == [], "the other one is still waited for"
    fetch.fetcher.lose(B)
    assert len(fetch.pump([A, B], 3.1)) == 1


def test_spans_are_requested_from_sources_and_from_the_preferred_donor() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    assert [action.to for action in fetch.pump([A], 0.0, [B]) if isinstance(action, Send)] == [B]
    fetch.differences.forget()
    fetch.differences.want_span(SPAN, A)
    (send,) = fetch.pump([A, B], 0.0, [B])
    assert isinstance(send, Send)
    assert send.to == A, "who holds something else is asked for it, be its line thin"
    assert fetch.pump([A, B], 0.1, [B]) == []


def test_a_span_moves_to_a_better_source_but_not_from_the_preferred_donor() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    assert fetch.pump([A], 0.1, [A]) == []
    assert [action.to for action in fetch.pump([A], 0.1, [B]) if isinstance(action, Send)] == [B]
    fetch.differences.forget()
    fetch.differences.want_span(SPAN, A)
    fetch.pump([A], 0.0)
    assert fetch.pump([A], 0.1, [B]) == []


def test_unrequested_pieces_are_dropped() -> None:
    fetch, _ = catch_up()
    assert fetch.fetcher.take_piece(A, piece(), 0.0) == []
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    assert fetch.fetcher.take_piece(B, piece(), 0.0) == []


@pytest.mark.parametrize("reply", [piece(total=99), piece(body=b""), piece(body=b"123456789")])
def test_a_donor_of_pieces_that_do_not_fit_is_replaced(reply: SpanReply) -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    (report,) = fetch.fetcher.take_piece(A, reply, 0.1)
    assert isinstance(report, Report)
    assert "served a piece that does not fit fragment 0 span 0; asking others first for 60 s" in report.text
    (send,) = fetch.pump([A, B], 0.1)
    assert isinstance(send, Send)
    assert send.to == B
    assert fetch.fetcher.take_piece(B, reply, 0.2) != []
    assert fetch.fetcher.take_piece(A, reply, 0.2) == []
    assert len(fetch.pump([A, B], 0.2)) == 1, "when all are shunned, some donor is better than none"
    assert SPAN not in chains.heads


def test_a_donor_that_stops_serving_is_reported_and_used_again_if_it_is_the_only_one() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    report, again = fetch.pump([A], 3.0)
    assert isinstance(report, Report)
    assert "served nothing of fragment 0 span 0 for 3 s" in report.text
    assert isinstance(again, Send)
    assert again.to == A
    (again,) = fetch.pump([A], 7.1)
    assert isinstance(again, Send), "what was said is not said again"


def test_a_donor_that_answers_partly_gets_more_time_but_not_forever() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A, B], 0.0)
    for second in range(1, int(LONGEST_ANSWER_SECONDS)):
        fetch.fetcher.received(A, float(second))
        fetch.fetcher.received(B, float(second))
        assert fetch.pump([A, B], second + 0.5) == []
    fetch.fetcher.received(A, LONGEST_ANSWER_SECONDS + 1.0)
    assert len(fetch.pump([A, B], LONGEST_ANSWER_SECONDS + 1.0)) == 2


def test_pieces_of_a_dead_donor_are_kept_and_the_next_donor_continues() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    fetch.fetcher.take_piece(A, piece(body=b"1234"), 0.1)
    fetch.fetcher.lose(A)
    assert asked(fetch.pump([B], 0.2)) == [question(4)]
    fetched(fetch, B, piece(4, b"5678"), 0.3, state=b"12345678")
    assert chains.heads[SPAN] == NEW


def test_a_late_piece_counts_and_a_repeated_one_does_not() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    fetch.fetcher.take_piece(A, piece(body=b"1234"), 0.1)
    fetch.pump([A, B], 3.0)
    assert fetch.fetcher.take_piece(A, piece(4, b"56"), 3.1) == [], "kept, but B is asked already"
    (again,) = asked(fetch.fetcher.take_piece(B, piece(4, b"56"), 3.2))
    assert again == question(6), "B says it again, and goes on behind it"
    fetched(fetch, A, piece(6, b"78"), 3.3, state=b"12345678")
    assert chains.heads[SPAN] == NEW


def test_pieces_of_an_abandoned_version_change_nothing() -> None:
    fetch, chains = catch_up()
    other = head_of(height=6, digest=b"other")
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    assert fetch.fetcher.take_piece(A, piece(4, b"5678"), 0.1) == [], "nothing of that version is here"
    fetch.fetcher.take_piece(A, piece(body=b"1234"), 0.2)
    fetch.fetcher.lose(A)
    fetch.pump([B], 0.3)
    fetch.fetcher.take_piece(B, piece(body=b"abcd", head=other), 0.4)
    assert fetch.fetcher.take_piece(A, piece(4, b"5678"), 0.5) == []
    fetched(fetch, B, piece(4, b"efgh", head=other), 0.6, state=b"abcdefgh")
    assert chains.heads[SPAN] == other


def test_a_gap_between_pieces_is_not_an_answer() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    fetch.fetcher.take_piece(A, piece(body=b"12"), 0.1)
    (report,) = fetch.fetcher.take_piece(A, piece(4, b"5678"), 0.2)
    assert isinstance(report, Report)


def test_entries_are_requested_before_spans() -> None:
    spans = [SpanId(0, index) for index in range(20)]
    fetch, chains = catch_up(*spans)
    for span in spans[10:]:
        chains.set_head(span, head_of())
    fetch.fetcher.want_everything()
    for span in spans[10:]:
        fetch.fetcher.want_entry(span, None)
    kinds = [type(message) for message in asked(fetch.pump([A], 0.0))]
    assert kinds == [EntryRequest] * 4 + [SpanRequest] * 4


def test_a_log_does_not_go_back() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.differences.want_span(SPAN, A)
    fetch.pump([A], 0.0)
    assert fetch.fetcher.take_piece(A, piece(head=head_of(height=3)), 0.1) == []
    assert fetch.is_complete()
    assert chains.heads[SPAN] == NEW


def differs(fetch: CatchUp, peer: PeerId, head: SpanHead, now: float) -> list[Action]:
    """Record the heads of a peer, and return the actions that follow."""
    fetch.differences.ask_tips(0, peer, now)
    reply = HeadsReply(fragment=0, heads=(head,))
    return fetch.differences.compare_tips(peer, reply, now) if fetch.differences.take_tips(peer, reply) else []


def heads(fetch: CatchUp, donor: bytes, head: SpanHead, now: float = 0.0) -> bool:
    fetch.differences.ask_tips(0, donor, now)  # type: ignore[arg-type]
    reply = HeadsReply(fragment=0, heads=(head,))
    if not fetch.differences.take_tips(donor, reply):  # type: ignore[arg-type]
        return False
    fetch.differences.compare_tips(donor, reply, now)  # type: ignore[arg-type]
    return True


def test_heads_are_requested_from_one_peer_at_a_time_and_accepted_from_no_other() -> None:
    fetch, _ = catch_up()
    assert len(fetch.differences.ask_tips(0, A, 0.0)) == 1
    assert fetch.differences.ask_tips(0, B, 0.1) == []
    assert not fetch.differences.take_tips(B, HeadsReply(fragment=0, heads=(NEW,)))
    assert not fetch.differences.take_tips(A, HeadsReply(fragment=0, heads=()))
    assert not fetch.differences.take_tips(A, HeadsReply(fragment=77, heads=(NEW,)))
    assert fetch.differences.take_tips(A, HeadsReply(fragment=0, heads=(NEW,)))
    assert not fetch.differences.take_tips(A, HeadsReply(fragment=0, heads=(NEW,)))


def test_a_log_that_cannot_be_joined_is_transferred() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.quorums.set(quorum(A))
    assert heads(fetch, A, NEW)
    assert asked(fetch.pump([A], 0.0)) == [EntryRequest(span=SPAN, parent=head_of().digest)]
    fetch.differences.entry_absent(B, SPAN, head_of().digest, 0.0)
    assert fetch.pump([A], 0.0) == []
    fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)
    assert isinstance(asked(fetch.pump([A], 0.0))[0], SpanRequest)


def test_an_entry_that_another_donor_lacks_is_requested_after_the_next_comparison() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([B], 0.0)
    fetch.differences.entry_absent(B, SPAN, head_of().digest, 0.0)
    assert fetch.pump([A, B], 0.0) == []


def test_a_majority_is_followed_once_no_peer_has_its_entries() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([A, B, C], 0.0)
    (report,) = fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)
    assert isinstance(report, Report), "one peer's word"
    assert "reports fragment 0 span 0 at height 5, here it is at 0" in report.text
    assert fetch.is_complete()
    assert heads(fetch, A, head_of(height=99, digest=b"99"), 1.0)
    assert fetch.is_complete(), "who could not show the entries is not followed for a while"
    assert heads(fetch, A, NEW, 2.0)
    assert heads(fetch, B, head_of(height=9, digest=b"other"), 3.0)
    fetch.pump([A, B, C], 3.0)
    (report,) = fetch.differences.entry_absent(B, SPAN, head_of().digest, 3.0)
    assert isinstance(report, Report), "two words, and they differ"
    assert heads(fetch, C, NEW, 6.0)
    fetch.pump([A, B, C], 6.0)
    (report,) = fetch.differences.entry_absent(C, SPAN, head_of().digest, 6.0)
    assert isinstance(report, Report)
    assert "no entries lead there; fetching the span" in report.text
    (send,) = fetch.pump([A, B, C], 6.0)
    assert isinstance(send, Send)
    assert (send.to, type(send.message)) == (min(A, C), SpanRequest)


def test_a_peer_without_entries_from_an_abandoned_tip_is_asked_for_those_after_the_fetched_span() -> None:
    """A member that had been alone for a minute lacked the last entries for a minute more after it had all spans."""
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([A, B, C], 0.0)
    fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)
    fetch.differences.want_span(SPAN, A)
    fetch.pump([A, B, C], 1.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(), 1.0), 1.0)
    (replaced,) = vouched(fetch, A, B, now=3.0)
    assert isinstance(replaced, ReplaceSpan)
    assert heads(fetch, A, head_of(height=6, digest=b"newer"), 8.0)
    assert asked(fetch.pump([A, B, C], 8.0)) == [EntryRequest(span=SPAN, parent=NEW.digest)]


def test_a_peer_at_a_greater_height_is_asked_for_entries_that_another_lacked() -> None:
    """Two members differed in memory, so no majority named a span; entries of one of them led to its tip."""
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([A, B, C], 0.0)
    fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)
    assert heads(fetch, B, NEW, 2.0)
    assert not fetch.fetcher.is_transferred(SPAN)
    (send,) = fetch.pump([A, B, C], 2.0)
    assert isinstance(send, Send)
    assert (send.to, send.message) == (B, EntryRequest(span=SPAN, parent=head_of().digest))


def test_a_donor_without_the_entries_of_one_span_is_asked_for_those_of_others() -> None:
    other = SpanId(0, 1)
    fetch, chains = catch_up(SPAN, other)
    fetch.quorums.set(quorum(A, B, C))
    for span in (SPAN, other):
        chains.set_head(span, head_of())

    def compare(heads: tuple[SpanHead, SpanHead], now: float) -> list[object]:
        fetch.differences.ask_tips(0, A, now)
        reply = HeadsReply(fragment=0, heads=heads)
        assert fetch.differences.take_tips(A, reply)
        fetch.differences.compare_tips(A, reply, now)
        return asked(fetch.pump([A], now))

    assert compare((NEW, head_of()), 0.0) == [EntryRequest(span=SPAN, parent=head_of().digest)]
    assert len(fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.0)) == 1
    assert compare((NEW, NEW), 1.0) == [EntryRequest(span=other, parent=head_of().digest)]
    assert fetch.differences.entry_absent(A, other, head_of().digest, 1.0) == [], "it is named once, not for each span"


def test_a_peer_that_is_ahead_but_cannot_be_asked_is_not_waited_for() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([B], 0.0)
    fetch.differences.entry_absent(B, SPAN, head_of().digest, 0.0)
    assert fetch.pump([B], 0.0) == []
    assert fetch.is_complete()


def test_a_replay_continues_up_to_the_donors_height() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    heads(fetch, A, NEW)
    fetch.pump([A], 0.0)
    chains.set_head(SPAN, head_of(height=4, digest=b"4"))
    fetch.differences.entry_absorbed(SPAN, 0.5)
    assert len(fetch.pump([A], 0.0)) == 1
    chains.set_head(SPAN, NEW)
    fetch.differences.entry_absorbed(SPAN, 0.5)
    assert fetch.is_complete()
    fetch.differences.entry_absorbed(SPAN, 0.5)


def test_the_parent_of_a_waiting_entry_is_fetched() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.fetcher.want_entry(SPAN, B)
    (send,) = fetch.pump([A, B], 0.0)
    assert isinstance(send, Send)
    assert send.to == B


def test_adopting_a_branch_gives_up_a_longer_log() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.adopt()
    assert fetch.differences.is_adopting
    assert not fetch.is_complete()
    theirs = head_of(height=2, digest=b"theirs")
    fetch.quorums.set(quorum(A, B))
    heads(fetch, A, theirs)
    assert fetch.pump([A], 0.0) == [], "one of two has spoken"
    fetch.quorums.set(quorum(A))
    heads(fetch, A, theirs, 3.0)
    fetch.pump([A], 3.0)
    fetched(fetch, A, piece(head=theirs), 3.1)
    assert chains.heads[SPAN] == theirs
    assert fetch.is_complete()
    assert not fetch.differences.is_adopting


def test_a_peer_already_at_the_new_branchs_tips_fetches_nothing() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.adopt()
    fetch.differences.adopted(0)
    assert fetch.is_complete()


def test_digests_are_requested_until_two_agree() -> None:
    fetch, _ = catch_up()
    (send,) = fetch.verifier.ask_content(0, A, 0.0)
    assert isinstance(send, Send)
    assert send.message == ContentRequest(fragment=0)
    assert fetch.verifier.ask_content(0, A, 0.1) == []


def test_a_span_corrected_from_disk_is_not_fetched() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.differences.want_span(SPAN, A)
    assert mended(fetch, NEW) == [ReplaceSpan(span=SPAN, head=NEW, state=b"12345678", is_mended=True)]
    assert fetch.pump([A], 0.0) == []


def test_an_entry_that_arrives_unrequested_is_no_longer_requested() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.fetcher.want_entry(SPAN, A)
    fetch.differences.entry_absorbed(SPAN, 0.1)
    assert fetch.pump([A], 0.2) == []


def test_one_lost_request_does_not_delay_the_repeat_of_the_next() -> None:
    """The timeout was learnt from the late answer; the next lost request was waited for as long."""
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    fetch.pump([A], 2.5)
    fetch.fetcher.take_piece(A, piece(body=b"1234"), 100.0)
    assert len(fetch.pump([A], 100.1 + LONGEST_ANSWER_SECONDS)) > 0, "asked again after so long at the latest"
    fetch.fetcher.lose(A)
    fetch.pump([A], 300.0)
    fetch.fetcher.received(A, 299.0 + LONGEST_ANSWER_SECONDS)
    assert len(fetch.pump([A], 300.1 + LONGEST_ANSWER_SECONDS)) > 0, "whatever else the donor answers meanwhile"
    fetched(fetch, A, piece(4, b"5678"), 300.2 + LONGEST_ANSWER_SECONDS, state=b"12345678")
    assert fetch.is_complete()


def test_a_fetched_span_waits_until_a_majority_has_named_it() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(A, B, C))
    fetch.pump([A], 0.0)
    assert hashed(fetch, fetch.fetcher.take_piece(A, piece(), 0.1), 0.1) == []
    assert fetch.verifier.is_waiting_for_a_majority
    assert vouched(fetch, A, now=0.2) == [], "the donor's word alone"
    (replaced,) = vouched(fetch, B, now=3.0)
    assert isinstance(replaced, ReplaceSpan)
    assert chains.heads[SPAN] == NEW
    assert not fetch.verifier.is_waiting_for_a_majority


def test_a_donor_of_bytes_that_a_majority_does_not_hold_is_reported_and_dropped() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(A, B, C))
    fetch.pump([A], 0.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(body=b"garbage!"), 0.1), 0.1)
    (report,) = vouched(fetch, B, C, now=0.2)
    assert isinstance(report, Report)
    assert "served fragment 0 span 0 with other bytes than a majority holds" in report.text
    assert SPAN not in chains.heads
    (send,) = [action for action in fetch.pump([A, B], 0.3) if isinstance(action, Send)]
    assert send.to == B


def test_after_wrong_bytes_all_peers_are_asked_again_what_they_hold() -> None:
    """The only voter had named its damaged memory: a joiner fetched the corrected bytes again and again."""
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(A))
    fetch.pump([A], 0.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(body=b"damaged!"), 0.1), 0.1)
    assert vouched(fetch, A, now=0.2), "it named other bytes than came"
    fetch.pump([A], 0.3)
    arrived = hashed(fetch, fetch.fetcher.take_piece(A, piece(), 0.4), 0.4)
    assert arrived == [], "what it named before does not count any more"
    assert vouched(fetch, A, now=100.0)
    assert SPAN in chains.heads


def test_a_tip_without_a_majority_is_given_up_for_the_one_with_it() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(A, B, C))
    fetch.pump([A], 0.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(head=head_of(height=99, digest=b"99")), 0.1), 0.1)
    assert vouched(fetch, B, C, now=0.2) == []
    (send,) = [action for action in fetch.pump([A, B, C], 9.0) if isinstance(action.message, SpanRequest)]  # type: ignore[union-attr]
    assert isinstance(send, Send)
    assert send.to == min(B, C)


def test_the_initial_state_waits_for_the_founders_answer_whatever_others_hold() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(replace(quorum(A, B), founder=C, founder_holds=True))
    fetch.pump([C], 0.0)
    start = head_of()
    hashed(fetch, fetch.fetcher.take_piece(C, piece(head=start), 0.1), 0.1)
    assert vouched(fetch, A, B, now=0.2) == []
    fetch.pump([C], 9.0)
    assert fetch.verifier.is_waiting_for_a_majority
    (replaced,) = vouched(fetch, C, head=start, now=9.0)
    assert isinstance(replaced, ReplaceSpan)
    assert chains.heads[SPAN] == start


def test_a_hash_of_a_span_no_longer_wanted_changes_nothing() -> None:
    fetch, _ = catch_up()
    assert fetch.verifier.hashed(SpanHashed(span=SPAN, head=NEW, content=NEW.digest), 0.0) == []
    assert fetch.differences.parent_rebuilt(ParentRebuilt(span=SPAN, tip=NEW.digest, parent=NEW, state=b"")) == []


def test_a_fetched_span_is_dropped_once_entries_lead_beyond_it() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.differences.want_span(SPAN, A)
    fetch.quorums.set(quorum(A))
    fetch.pump([A], 0.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(), 0.1), 0.1)
    chains.set_head(SPAN, head_of(height=6, digest=b"beyond"))
    assert vouched(fetch, A, now=0.2) == []
    assert fetch.is_complete()


BEYOND = head_of(height=6, digest=b"beyond")


def overruled(*peers: PeerId, founder: PeerId | None = None) -> tuple[CatchUp, ChainBook]:
    """Return a peer that fetches a span because these peers hold other bytes, while its log moves beyond them."""
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.quorums.set(replace(quorum(*peers), founder=founder, founder_holds=founder is not None))
    differing(fetch, *peers)
    fetch.pump([A], 0.0)
    chains.set_head(SPAN, BEYOND)
    return fetch, chains


def test_an_overruled_span_goes_back_to_the_bytes_that_a_majority_named() -> None:
    """Every transfer took longer than the next entry. It was cancelled each time, and the wrong bytes stayed."""
    fetch, chains = overruled(A, B, C)
    fetch.differences.entry_absorbed(SPAN, 0.1)
    order = fetch.fetcher.take_piece(A, piece(), 0.1)
    assert vouched(fetch, A, B, now=0.2) == []
    report, replaced = hashed(fetch, order, 0.3)
    assert report == Report(
        topic="adoption",
        text=f"{SPAN} goes back from height 6 to 5, where a majority has named the right bytes; the entries since then "
        "follow again",
    )
    assert replaced == ReplaceSpan(span=SPAN, head=NEW, state=b"12345678", is_adoption=True)
    assert chains.heads[SPAN] == NEW
    assert fetch.is_complete()


def test_an_overruled_span_keeps_waiting_for_a_majority_if_one_donor_serves_other_bytes() -> None:
    fetch, chains = overruled(A, B, C)
    assert hashed(fetch, fetch.fetcher.take_piece(A, piece(body=b"deceived"), 0.1), 0.1) == []
    assert chains.heads[SPAN] == BEYOND
    (shunned,) = [action for action in vouched(fetch, B, C, now=0.2) if isinstance(action, Report)]
    assert "other bytes than a majority holds" in shunned.text
    fetch.pump([B], 0.3)
    vouched(fetch, B, C, now=0.3)
    hashed(fetch, fetch.fetcher.take_piece(B, piece(), 0.4), 0.4)
    assert chains.heads[SPAN] == NEW


def test_an_overruled_span_does_not_go_back_to_the_start_because_of_the_founder() -> None:
    """Its answer is enough for a span without entries, but not to undo entries."""
    fetch, chains = overruled(A, B, C, founder=A)
    start = head_of(height=0, digest=b"0")
    assert hashed(fetch, fetch.fetcher.take_piece(A, piece(head=start), 0.1), 0.1) == []
    assert vouched(fetch, A, head=start, now=0.2) == []
    assert chains.heads[SPAN] == BEYOND
    assert fetch.is_complete(), "the next comparison shows what is needed"


def test_a_majority_at_a_lower_height_gets_two_cycles_before_a_span_goes_back() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, NEW)
    lower = head_of(height=3, digest=b"3")
    for now in (0.0, 3.0, 30.0):
        for peer in (A, B):
            assert heads(fetch, peer, lower, now)
    assert fetch.is_complete()
    assert heads(fetch, A, lower, 40.0)
    assert not fetch.is_complete()
    assert heads(fetch, B, lower, 41.0), "it is being fetched already"
    fetch.pump([A], 41.0)
    (replaced,) = [one for one in fetched(fetch, A, piece(head=lower), 42.0) if isinstance(one, ReplaceSpan)]
    assert replaced.is_adoption
    assert chains.heads[SPAN] == lower


def test_one_peers_claim_of_a_greater_height_stops_no_contribution() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    assert not fetch.is_complete()
    assert fetch.differences.left_out() == frozenset()
    assert heads(fetch, B, NEW)
    assert fetch.differences.left_out() == frozenset({SPAN})


def test_a_peer_that_claims_a_greater_height_but_does_not_answer_is_not_waited_for() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    chains.set_head(SPAN, head_of())
    reports: list[Action] = []
    now = 0.0
    while not reports and now < 60.0:
        heads(fetch, A, NEW, now)
        for send in fetch.pump([A, B, C], now):
            if isinstance(send, Send) and send.to != A:
                reports += fetch.differences.entry_absent(send.to, SPAN, head_of().digest, now)
        now += 2.5
    (report,) = reports
    assert isinstance(report, Report)
    assert fetch.is_complete()
    assert heads(fetch, A, NEW, now)
    assert fetch.is_complete()
    assert heads(fetch, A, NEW, now + 8.0), "an answer may have been lost"
    assert not fetch.is_complete()


def test_neither_a_lower_peer_nor_a_majority_at_our_last_tip_changes_anything() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, B, C))
    certified = roster_1(3)
    chains.set_head(SPAN, head_of())
    book = book_with(founding(), certified)
    owner = book.folded(certified.roster.digest(), 4)[1].owner(SPAN)
    assert owner is not None
    entry = entry_on(head_of(), certified.roster, owner, round=4)
    chains.offer(entry, 1.0, book, latest_round=1000)
    assert chains.heads[SPAN].height == 1
    for now in (0.0, 3.0, 100.0):
        for peer in (A, B):
            assert heads(fetch, peer, head_of(), now)
    assert fetch.is_complete(), "they lack the entry that we have, and ask for it"


def test_a_tie_is_checked_against_the_own_disk_once() -> None:
    fetch, chains = catch_up()
    fetch.quorums.set(quorum(A, needed=2))
    chains.set_head(SPAN, head_of())
    assert fetch.differences.ask_tips(0, A, 0.0)
    reply = HeadsReply(fragment=0, heads=(head_of(digest=b"later", round_index=7),))
    assert fetch.differences.take_tips(A, reply)
    assert fetch.differences.compare_tips(A, reply, 0.0) == [RebuildParent(span=SPAN, tip=head_of().digest)]
    assert fetch.differences.compare_tips(A, reply, 0.1) == []


def test_half_of_the_electorate_on_another_child_is_a_tie_even_if_all_dialable_peers_agree_with_us() -> None:
    """A peer behind a router dials only the bootstrap, which does not vote."""
    fetch, chains = catch_up()
    electorate = replace(quorum(A, B, C, needed=3), half=2.0)  # this peer is the fourth
    bootstrap = ids(4)[3]
    fetch.quorums.set(quorum(bootstrap, needed=2), electorate)
    chains.set_head(SPAN, head_of())
    assert heads(fetch, bootstrap, head_of())
    reply = HeadsReply(fragment=0, heads=(head_of(digest=b"later", round_index=7),))
    assert fetch.differences.compare_tips(A, reply, 0.0) == [], "one of four is no half"
    assert fetch.differences.compare_tips(B, reply, 0.1) == [RebuildParent(span=SPAN, tip=head_of().digest)]


def test_the_highest_tip_is_followed() -> None:
    fetch, chains = catch_up()
    third = head_of(height=3, digest=b"3")
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    assert heads(fetch, B, third)
    chains.set_head(SPAN, third)
    fetch.differences.entry_absorbed(SPAN, 0.5)
    assert not fetch.is_complete(), "A stands at 5"


def undecided(*tips: SpanHead, mine: SpanHead, seconds: float = 40.0) -> tuple[CatchUp, list[str]]:
    """Hold a tip for a while, while others hold theirs and no disk can go back; return what is reported."""
    fetch, chains = catch_up()
    peers = ids(len(tips) + 1)[1:]
    fetch.quorums.set(replace(quorum(*peers), needed=max(len(peers) // 2 + 1, 2)))
    chains.set_head(SPAN, mine)
    said: list[str] = []
    for now in (0.0, seconds):
        for peer, tip in zip(peers, tips, strict=True):
            for action in differs(fetch, peer, tip, now):
                if isinstance(action, RebuildParent):
                    reports = fetch.differences.parent_rebuilt(ParentRebuilt(span=SPAN, tip=mine.digest))
                    said += [report.text for report in reports if is_report(report)]
                elif isinstance(action, Report):
                    said.append(action.text)
    return fetch, [text for text in said if "none has a majority" in text]


def is_report(action: Action) -> TypeGuard[Report]:
    return isinstance(action, Report)


ONE, TWO, THREE = (head_of(height=3, digest=name, round_index=7) for name in (b"one", b"two", b"three"))


def test_without_a_majority_all_peers_adopt_the_tip_with_most_peers() -> None:
    fetch, said = undecided(TWO, TWO, ONE, ONE, mine=THREE)
    (text,) = said
    assert "has 3 tips and none has a majority" in text
    assert not fetch.is_complete()
    best = min(ONE, TWO, key=lambda head: head.digest)
    other = TWO if best == ONE else ONE
    assert undecided(best, other, other, THREE, mine=best)[1] == []
    assert len(undecided(best, best, other, THREE, mine=other)[1]) == 1


def test_between_two_halves_the_higher_tip_wins_and_then_the_later_round() -> None:
    later = replace(TWO, round=9)
    assert len(undecided(later, later, ONE, ONE, THREE, mine=THREE)[1]) == 1
    assert undecided(ONE, later, mine=later)[1] == []
    assert undecided(later, THREE, mine=replace(ONE, height=4))[1] == []


def test_no_tip_is_adopted_without_a_majority_before_two_cycles_or_with_few_peers_heard() -> None:
    assert undecided(TWO, TWO, ONE, ONE, mine=THREE, seconds=30.0)[1] == []
    fetch, chains = catch_up()
    fetch.quorums.set(replace(quorum(A, B, C), holders=frozenset((A,))))
    chains.set_head(SPAN, THREE)
    for now in (0.0, 40.0):
        heads(fetch, A, min(ONE, TWO, key=lambda head: head.digest), now)
    assert fetch.is_complete()


def test_a_span_of_the_only_other_member_is_requested_again_after_it_has_moved_on() -> None:
    """It confirms only its current tip; a peer that had fetched the span earlier waited forever."""
    fetch, _ = catch_up()
    fetch.quorums.set(quorum(A, needed=2))
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    hashed(fetch, fetch.fetcher.take_piece(A, piece(), 0.1), 0.1)
    gone_on = head_of(height=6, digest=b"newer")
    assert vouched(fetch, A, head=gone_on, now=9.0) == []
    fetch.pump([A], 12.0)
    (again,) = [one for one in asked(fetch.pump([A], 12.1)) if isinstance(one, SpanRequest)] or [question(0)]
    assert again.offset == 0
    taken = hashed(fetch, fetch.fetcher.take_piece(A, piece(head=gone_on), 12.2), 12.2)
    assert any(isinstance(action, ReplaceSpan) for action in taken), "it has said so already"


def test_a_donor_that_lacks_the_next_entry_does_not_end_the_transfer_of_a_span() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.quorums.set(quorum(A, B, C))
    fetch.differences.want_span(SPAN, A)
    fetch.pump([A, B, C], 0.0)
    assert fetch.differences.entry_absent(A, SPAN, head_of().digest, 0.1) == []
    assert fetch.fetcher.is_transferred(SPAN)


def test_one_donor_of_three_that_never_serves_does_not_keep_a_peer_from_following_the_majority() -> None:
    fetch, chains = catch_up()
    mine, liar = head_of(height=3, digest=b"lost"), min(A, B, C)
    chains.set_head(SPAN, mine)
    fetch.quorums.set(quorum(A, B, C, needed=3))
    content = ContentReply(fragment=0, digests=((NEW.digest, content_of(b"12345678")),))
    num_replaced = 0
    for second in range(150):
        now = float(second)
        queue: list[Action] = []
        for peer in (A, B, C):
            if fetch.differences.ask_tips(0, peer, now):
                reply = HeadsReply(fragment=0, heads=(NEW,))
                assert fetch.differences.take_tips(peer, reply)
                queue += fetch.differences.compare_tips(peer, reply, now)
            queue += fetch.pump([A, B, C], now)
        while queue:
            action = queue.pop(0)
            num_replaced += isinstance(action, ReplaceSpan)
            if isinstance(action, HashSpan):
                queue += fetch.verifier.hashed(
                    SpanHashed(span=action.span, head=action.head, content=content_of(bytes(action.state))), now
                )
            if not isinstance(action, Send):
                continue
            match action.message:
                case SpanRequest(offset=offset) if action.to != liar:
                    queue += fetch.fetcher.take_piece(action.to, piece(offset), now)
                case ContentRequest():
                    queue += fetch.verifier.take_content(action.to, content, now)
                case _:
                    queue += fetch.differences.entry_absent(action.to, SPAN, mine.digest, now)
                    queue += fetch.pump([A, B, C], now)
    assert num_replaced == 1


def test_tips_of_a_former_member_do_not_confirm_the_claim_of_another_peer() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    former = peer_id("former")
    high = HeadsReply(fragment=0, heads=(head_of(height=9, digest=b"no such"),))
    fetch.quorums.set(quorum(A, B, C, former, needed=3))
    fetch.differences.compare_tips(former, high, 0.0)
    fetch.pump([A, B, C, former], 0.0)
    fetch.differences.entry_absent(former, SPAN, head_of().digest, 0.1)
    fetch.quorums.set(quorum(A, B, C, needed=3))
    fetch.pump([A, B, C], 900.0)
    fetch.differences.compare_tips(A, high, 900.0)
    assert fetch.differences.left_out() == frozenset(), "one peer's claim keeps no contribution back"


def test_the_tips_of_former_members_are_dropped() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.quorums.set(quorum(A, B, C, needed=2))
    replies = [HeadsReply(fragment=0, heads=(NEW,) * 1) for _ in range(100)]
    free = [sys.getrefcount(reply.heads) for reply in replies]
    for number, reply in enumerate(replies):
        fetch.differences.compare_tips(peer_id(str(number)), reply, float(number))
    num_kept = sum(sys.getrefcount(reply.heads) > before for reply, before in zip(replies, free, strict=True))
    assert num_kept <= 2 * 3 + MOST_FORMER
