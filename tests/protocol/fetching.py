"""A `CatchUp` that fetches one span, and pieces that arrive for it."""

from __future__ import annotations

from itertools import count

from fake_run import RUN, peer_id, run_rules, verify
from made import SPAN, head_of, ids

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.log import SpanHead
from p2p_diloco.protocol.actions import Action, HashSpan
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.donors import FIRST_PIECE_BYTES
from p2p_diloco.protocol.repair.majority import Voices
from p2p_diloco.protocol.repair.signed_content import FarVoters
from p2p_diloco.protocol.repair.transfer import CatchUpRules
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.entry import EntryRules
from p2p_diloco.protocol.wire.messages import ContentReply, SpanReply, SpanRequest

A, B, C = ids(3)
ME = peer_id("me")
NEW = head_of(height=5, digest=b"new")


def far_voters(num_spans: tuple[int, ...] = (1,)) -> FarVoters:
    """Return the voters that a peer asks through others, with increasing request numbers."""
    numbers = count(1)
    return FarVoters(
        me=ME, draw_nonce=lambda now: next(numbers), num_spans=num_spans, answer_seconds=2.0, pause_seconds=2.0
    )


def catch_up() -> tuple[CatchUp, ChainBook]:
    rules = EntryRules(run=RUN, clock=run_rules().clock, radius_limit=3.0)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    return CatchUp(far=far_voters(), rules=what_is_fetched(SPAN), chains=chains), chains


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


def voices(*peers: PeerId, needed: int | None = None) -> Voices:
    """Return voices that are all heard; more than half of them are needed."""
    heard = frozenset(peers)
    return Voices(near=heard, heard=heard, needed=needed if needed is not None else len(heard) // 2 + 1)


def content_of(state: bytes) -> Digest:
    return sha256(b"content", state)


def hashed(fetch: CatchUp, actions: list[Action], now: float) -> list[Action]:
    """Answer the one `HashSpan` among these actions, as the node does."""
    (order,) = [action for action in actions if isinstance(action, HashSpan)]
    return fetch.span_hashed(order.span, order.head, content_of(bytes(order.state)), now)


def vouched(
    fetch: CatchUp, *peers: PeerId, head: SpanHead = NEW, state: bytes = b"12345678", now: float = 9.0
) -> list[Action]:
    """Ask voices what they hold of the span that is being fetched; all give the same answer."""
    fetch.pump([], now)
    reply = ContentReply(fragment=0, digests=((head.digest, content_of(state)),))
    return [action for peer in peers for action in fetch.take_content(peer, reply, now)]


def fetched(fetch: CatchUp, donor: PeerId, reply: SpanReply, now: float, state: bytes | None = None) -> list[Action]:
    """Take the last piece from a donor whose answer is sufficient."""
    fetch.listen_to(voices(donor))
    actions = hashed(fetch, fetch.take_span(donor, reply, now), now)
    whole = state if state is not None else bytes(reply.piece)
    return actions + vouched(fetch, donor, head=reply.head, state=whole, now=now)
