"""A `CatchUp` that fetches one span, and pieces that arrive for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from fake_run import peer_id, run_rules, verify
from made import SPAN, head_of, ids

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import Action, HashSpan
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.donors import FIRST_PIECE_BYTES
from p2p_diloco.protocol.repair.fetcher import CatchUpRules
from p2p_diloco.protocol.repair.quorum import Quorum
from p2p_diloco.protocol.repair.signed_content import IndirectVoters
from p2p_diloco.protocol.results import ContentCompared, SpanHashed, SpanRebuilt
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import ContentReply, SpanReply, SpanRequest
from p2p_diloco.span_log import SpanHead

A, B, C = ids(3)
ME = peer_id("me")
NEW = head_of(height=5, digest=b"new")


def indirect_voters(rules: CatchUpRules) -> IndirectVoters:
    """Return the voters that a peer asks through others, with increasing request numbers."""
    numbers = count(1)
    return IndirectVoters(me=ME, draw_nonce=lambda now: next(numbers), rules=replace(rules, pause_seconds=2.0))


def catch_up(*spans: SpanId, span_bytes: int = 8) -> tuple[CatchUp, ChainBook]:
    """Return what fetches spans of one fragment, or the one span of most tests."""
    wanted = what_is_fetched(*(spans or (SPAN,)), span_bytes=span_bytes)
    rules = run_rules()
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    return CatchUp(me=ME, indirect=indirect_voters(wanted), rules=wanted, chains=chains), chains


def what_is_fetched(*spans: SpanId, span_bytes: int = 8) -> CatchUpRules:
    return CatchUpRules(
        num_spans=(len(spans),),
        span_bytes=dict.fromkeys(spans, span_bytes),
        answer_seconds=2.0,
        entry_seconds=2.0,
        piece_seconds=2.0,
        piece_target_seconds=1.0,
        pause_seconds=8.0,
        patience_seconds=32.0,
    )


def piece(offset: int = 0, body: bytes = b"12345678", head: SpanHead = NEW, total: int = 8) -> SpanReply:
    return SpanReply(span=SPAN, head=head, total_bytes=total, offset=offset, piece=body)


def question(offset: int) -> SpanRequest:
    return SpanRequest(span=SPAN, version=NEW.digest, offset=offset, most_bytes=FIRST_PIECE_BYTES)


def quorum(*peers: PeerId, needed: int | None = None) -> Quorum:
    """Return witnesses that all hold the state; more than half of them are needed."""
    holders = frozenset(peers)
    return Quorum(witnesses=holders, holders=holders, needed=needed if needed is not None else len(holders) // 2 + 1)


def content_of(state: bytes) -> Digest:
    return sha256(b"content", state)


def hashed(fetch: CatchUp, actions: list[Action], now: float) -> list[Action]:
    """Answer the one `HashSpan` among these actions, as the node does."""
    (order,) = [action for action in actions if isinstance(action, HashSpan)]
    return fetch.verifier.hashed(
        SpanHashed(span=order.span, head=order.head, content=content_of(bytes(order.state))), now
    )


def vouched(
    fetch: CatchUp, *peers: PeerId, head: SpanHead = NEW, state: bytes = b"12345678", now: float = 9.0
) -> list[Action]:
    """Ask witnesses what they hold of the span that is being fetched; all give the same answer."""
    fetch.pump([], now)
    reply = ContentReply(fragment=0, digests=((head.digest, content_of(state)),))
    return [action for peer in peers for action in fetch.verifier.take_content(peer, reply, now)]


def differing(fetch: CatchUp, *peers: PeerId, now: float = 0.0) -> list[Action]:
    """Let peers hold other bytes of `SPAN` at its tip, which this disk confirms."""
    tip = fetch.chains.heads[SPAN]
    actions: list[Action] = []
    for peer in peers:
        fetch.verifier.ask_content(0, peer, now)
        assert fetch.scrub.take(peer, ContentReply(fragment=0, digests=((tip.digest, content_of(b"other")),)))
        actions += fetch.verifier.compared(ContentCompared(peer=peer, fragment=0, num_equal=0, differing=(SPAN,)), now)
    return actions + fetch.verifier.rebuilt(SpanRebuilt(span=SPAN, head=tip), peers, now)


def mended(fetch: CatchUp, head: SpanHead) -> list[Action]:
    """Rebuild the damaged bytes of `SPAN` from this disk, and return what replaces them."""
    fetch.verifier.damage(SPAN, "a reason")
    return fetch.verifier.rebuilt(SpanRebuilt(span=SPAN, head=head, state=b"12345678"), [], 0.0)[1:]


def fetched(fetch: CatchUp, donor: PeerId, reply: SpanReply, now: float, state: bytes | None = None) -> list[Action]:
    """Take the last piece from a donor whose answer is sufficient."""
    fetch.quorums.set(quorum(donor))
    actions = hashed(fetch, fetch.fetcher.take_piece(donor, reply, now), now)
    whole = state if state is not None else bytes(reply.piece)
    return actions + vouched(fetch, donor, head=reply.head, state=whole, now=now)
