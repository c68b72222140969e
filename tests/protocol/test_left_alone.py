"""Peers that are shunned or alone: what is still requested, and what is no longer waited for."""

from __future__ import annotations

from collections.abc import Callable

from fetching import A, B, catch_up, fetched, piece
from made import SPAN, head_of

from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.wire.messages import EntryRequest


def test_a_donor_shunned_for_a_span_is_still_asked_for_entries() -> None:
    fetch, chains = catch_up()
    fetch.fetcher.want_everything()
    fetch.pump([A], 0.0)
    fetch.fetcher.take_piece(A, piece(total=99), 0.1)  # that does not fit: others are asked for spans before A
    fetch.pump([B], 0.2)
    assert fetched(fetch, B, piece(head=head_of(height=4, digest=b"old")), 0.3)
    chains.heads[SPAN] = head_of(height=4, digest=b"old")
    fetch.fetcher.want_entry(SPAN, A)
    (send,) = fetch.pump([A, B], 0.4)
    assert isinstance(send, Send)
    assert isinstance(send.message, EntryRequest)
    assert send.to == A


def test_a_lone_peer_waits_for_nothing_beyond_what_it_holds() -> None:
    fetch, chains = catch_up()
    chains.heads[SPAN] = head_of(height=4, digest=b"old")
    wants: tuple[Callable[[], None], ...] = (
        lambda: fetch.fetcher.want_entry(SPAN, A), lambda: fetch.differences.want_span(SPAN, A), fetch.adopt
    )  # fmt: skip
    for want in wants:
        want()
        assert not fetch.is_complete()
        fetch.differences.stop_waiting()
        assert fetch.is_complete()
    del chains.heads[SPAN]
    fetch.fetcher.want_everything()
    fetch.adopt()
    fetch.fetcher.want_everything()
    fetch.differences.stop_waiting()
    assert not fetch.is_complete(), "what was never here is still needed"
