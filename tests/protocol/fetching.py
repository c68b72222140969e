"""A page that fetches one span, and pieces that come for it."""

from __future__ import annotations

from fake_run import RUN, run_rules, verify
from made import SPAN, head_of, ids

from p2p_diloco.ids import SpanHead, SpanId
from p2p_diloco.protocol.catch_up import CatchUp
from p2p_diloco.protocol.chain import ChainBook
from p2p_diloco.protocol.donors import FIRST_PIECE_BYTES
from p2p_diloco.protocol.entry import EntryRules
from p2p_diloco.protocol.messages import SpanReply, SpanRequest
from p2p_diloco.protocol.transfer import CatchUpRules

A, B, C = ids(3)
NEW = head_of(height=5, digest=b"new")


def catch_up() -> tuple[CatchUp, ChainBook]:
    rules = EntryRules(run=RUN, clock=run_rules().clock, radius_limit=3.0)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    return CatchUp(rules=what_is_fetched(SPAN), chains=chains), chains


def what_is_fetched(*spans: SpanId, span_bytes: int = 8) -> CatchUpRules:
    return CatchUpRules(
        num_spans=(len(spans),),
        span_bytes=dict.fromkeys(spans, span_bytes),
        answer_seconds=2.0,
        entry_seconds=2.0,
        piece_seconds=2.0,
        piece_target_seconds=1.0,
        pause_seconds=8.0,
    )


def piece(offset: int = 0, body: bytes = b"12345678", head: SpanHead = NEW, total: int = 8) -> SpanReply:
    return SpanReply(span=SPAN, head=head, total_bytes=total, offset=offset, piece=body)


def question(offset: int) -> SpanRequest:
    return SpanRequest(span=SPAN, version=NEW.digest, offset=offset, most_bytes=FIRST_PIECE_BYTES)
