"""The one repair: what is asked of whom, and what answers may do."""

from __future__ import annotations

from dataclasses import replace

from fake_run import RUN, run_rules, verify
from made import SPAN, head_of, ids

from p2p_diloco.ids import SpanHead
from p2p_diloco.protocol.actions import Action, CompareContent, ReplaceSpan, Send
from p2p_diloco.protocol.catch_up import CatchUp, CatchUpRules
from p2p_diloco.protocol.chain import ChainBook
from p2p_diloco.protocol.entry import EntryRules
from p2p_diloco.protocol.messages import ContentReply, EntryRequest, HeadsReply, SpanReply, SpanRequest

A, B, C = ids(3)
NEW = head_of(height=5, digest=b"new")


def catch_up() -> tuple[CatchUp, ChainBook]:
    rules = EntryRules(run=RUN, clock=run_rules().clock, radius_limit=3.0)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    what = CatchUpRules(num_spans=(1,), span_bytes={SPAN: 8}, answer_seconds=2.0)
    return CatchUp(rules=what, chains=chains), chains


def piece(offset: int = 0, body: bytes = b"12345678", head: SpanHead = NEW, total: int = 8) -> SpanReply:
    return SpanReply(span=SPAN, head=head, total_bytes=total, offset=offset, piece=body)


def asked(actions: list[Action]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_a_newcomer_fetches_each_span_in_pieces() -> None:
    fetch, chains = catch_up()
    fetch.want_everything()
    assert not fetch.is_complete()
    assert isinstance(asked(fetch.pump([A], 0.0))[0], SpanRequest)
    assert fetch.pump([A], 0.1) == []
    (following,) = asked(fetch.take_span(A, piece(body=b"1234"), 0.2))
    assert following == SpanRequest(span=SPAN, version=NEW.digest, offset=4)
    (replaced,) = fetch.take_span(A, piece(4, b"5678"), 0.3)
    assert replaced == ReplaceSpan(span=SPAN, head=NEW, state=b"12345678")
    assert chains.heads[SPAN] == NEW
    assert fetch.is_complete()


def test_what_is_not_answered_goes_to_another_donor() -> None:
    fetch, _ = catch_up()
    fetch.want_everything()
    fetch.pump([A], 0.0)
    (second,) = fetch.pump([B], 3.0)
    assert isinstance(second, Send)
    assert second.to == B
    fetch.lose(B)
    assert len(fetch.pump([A, B], 3.1)) == 1


def test_pieces_that_nobody_asked_for_are_dropped() -> None:
    fetch, _ = catch_up()
    assert fetch.take_span(A, piece(), 0.0) == []
    fetch.want_everything()
    fetch.pump([A], 0.0)
    assert fetch.take_span(B, piece(), 0.0) == []


def test_pieces_that_do_not_fit_are_dropped_and_not_asked_for_at_once() -> None:
    for reply in (piece(total=99), piece(4), piece(body=b""), piece(body=b"123456789")):
        fetch, chains = catch_up()
        fetch.want_everything()
        fetch.pump([A], 0.0)
        assert fetch.take_span(A, reply, 0.1) == []
        assert fetch.pump([A], 0.1) == []
        assert SPAN not in chains.heads


def test_a_log_does_not_go_back() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.want_transfer(SPAN, A)
    fetch.pump([A], 0.0)
    assert fetch.take_span(A, piece(head=head_of(height=3)), 0.1) == []
    assert fetch.is_complete()
    assert chains.heads[SPAN] == NEW


def heads(fetch: CatchUp, donor: bytes, head: SpanHead, now: float = 0.0) -> bool:
    fetch.ask_heads(0, donor, now)  # type: ignore[arg-type]
    reply = HeadsReply(fragment=0, heads=(head,))
    if not fetch.take_heads(donor, reply):  # type: ignore[arg-type]
        return False
    fetch.note_differences(donor, reply)  # type: ignore[arg-type]
    return True


def test_heads_are_asked_of_one_peer_at_a_time_and_taken_from_nobody_else() -> None:
    fetch, _ = catch_up()
    assert len(fetch.ask_heads(0, A, 0.0)) == 1
    assert fetch.ask_heads(0, B, 0.1) == []
    assert not fetch.take_heads(B, HeadsReply(fragment=0, heads=(NEW,)))
    assert not fetch.take_heads(A, HeadsReply(fragment=0, heads=()))
    assert not fetch.take_heads(A, HeadsReply(fragment=77, heads=(NEW,)))
    assert fetch.take_heads(A, HeadsReply(fragment=0, heads=(NEW,)))
    assert not fetch.take_heads(A, HeadsReply(fragment=0, heads=(NEW,)))


def test_a_log_that_cannot_be_joined_is_transferred() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    assert asked(fetch.pump([A], 0.0)) == [EntryRequest(span=SPAN, parent=head_of().digest)]
    fetch.entry_absent(B, SPAN, head_of().digest)
    assert fetch.pump([A], 0.0) == []
    fetch.entry_absent(A, SPAN, head_of().digest)
    assert isinstance(asked(fetch.pump([A], 0.0))[0], SpanRequest)


def test_an_entry_that_another_donor_lacks_is_raised_by_the_next_comparison() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([B], 0.0)
    fetch.entry_absent(B, SPAN, head_of().digest)
    assert fetch.pump([A, B], 0.0) == []


def test_when_two_donors_lack_the_entry_the_span_is_fetched_from_who_is_ahead() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    for sender in (B, C):
        assert heads(fetch, sender, NEW)
        assert heads(fetch, A, NEW)
        (send,) = fetch.pump([A, B, C], 0.0)
        assert isinstance(send, Send)
        assert send.to == sender
        fetch.entry_absent(sender, SPAN, head_of().digest)
    (send,) = fetch.pump([A, B, C], 0.0)
    assert isinstance(send, Send)
    assert (send.to, type(send.message)) == (A, SpanRequest)


def test_the_one_that_stands_highest_is_the_one_to_follow() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    assert heads(fetch, B, head_of(height=3, digest=b"3"))
    fetch.pump([A, B], 0.0)
    fetch.entry_absent(A, SPAN, head_of().digest)
    (send,) = fetch.pump([A, B], 0.0)
    assert isinstance(send, Send)
    assert (send.to, type(send.message)) == (A, SpanRequest)


def test_who_is_ahead_but_cannot_be_asked_is_not_waited_for() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    assert heads(fetch, A, NEW)
    fetch.pump([B], 0.0)
    fetch.entry_absent(B, SPAN, head_of().digest)
    assert fetch.pump([B], 0.0) == []
    assert fetch.is_complete()


def test_a_replay_goes_on_until_it_stands_where_the_donor_stood() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    heads(fetch, A, NEW)
    fetch.pump([A], 0.0)
    chains.set_head(SPAN, head_of(height=4, digest=b"4"))
    fetch.entry_absorbed(SPAN)
    assert len(fetch.pump([A], 0.0)) == 1
    chains.set_head(SPAN, NEW)
    fetch.entry_absorbed(SPAN)
    assert fetch.is_complete()
    fetch.entry_absorbed(SPAN)


def test_an_entry_that_waits_has_its_parent_fetched() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.want_entry(SPAN, B)
    (send,) = fetch.pump([A, B], 0.0)
    assert isinstance(send, Send)
    assert send.to == B


def test_equally_long_logs_move_to_the_later_round() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    heads(fetch, A, head_of(digest=b"x", round_index=7))
    assert isinstance(asked(fetch.pump([A], 0.0))[0], SpanRequest)


def test_a_false_height_is_put_right_once_two_say_so() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, replace(NEW, height=1000))
    heads(fetch, A, NEW)
    assert fetch.is_complete()
    heads(fetch, B, NEW)
    assert not fetch.is_complete()


def test_who_adopts_a_branch_gives_up_a_longer_log() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.adopt()
    assert fetch.is_adopting
    assert not fetch.is_complete()
    theirs = head_of(height=2, digest=b"theirs")
    heads(fetch, A, theirs)
    assert SPAN not in chains.heads
    fetch.pump([A], 0.0)
    fetch.take_span(A, piece(head=theirs), 0.1)
    assert chains.heads[SPAN] == theirs
    assert fetch.is_complete()
    assert not fetch.is_adopting


def test_who_stands_where_the_new_branch_stands_fetches_nothing() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    fetch.adopt()
    fetch.adopted(0)
    assert fetch.is_complete()


def test_two_witnesses_verify_and_two_accusers_condemn() -> None:
    fetch, chains = catch_up()
    chains.set_head(SPAN, NEW)
    reply = ContentReply(fragment=0, digests=())
    assert fetch.take_content(A, reply) == []
    for peer in (A, B):
        assert len(fetch.ask_content(0, peer, 0.0)) == 1
        assert fetch.ask_content(0, peer, 0.1) == []
        assert isinstance(fetch.take_content(peer, reply)[0], CompareContent)
        assert not fetch.is_verified([A, B])
        fetch.content_compared(peer, 0, 1, [])
    assert fetch.is_verified([A, B, C])
    assert fetch.ask_content(0, C, 0.2) == []
    fetch.check_again()
    assert not fetch.is_verified([A])
    assert fetch.content_compared(A, 0, 0, [SPAN]) == []
    assert fetch.content_compared(A, 0, 0, [SPAN]) == []
    assert fetch.content_compared(B, 0, 0, [SPAN]) == [SPAN]
