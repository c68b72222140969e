"""A member that lies, in a process of its own: `python lying_peer.py ORDER.json`; its order also names a `lie`.

It is a true peer, but each message passes a mutator on its way to the transport. Lies begin when the file `lie` appears
in its folder.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from p2p_diloco.codec.int4 import Int4Codec
from p2p_diloco.ids import Digest, PeerId, SpanHead, sha256
from p2p_diloco.protocol.actions import ReduceSpan
from p2p_diloco.protocol.entry import RADIUS_BOUNDS, WEIGHT_BOUNDS, Entry, within_reach
from p2p_diloco.protocol.exchange import Exchange
from p2p_diloco.protocol.heartbeat import SHORT_DIGEST_BYTES, FragmentHead, Heartbeat
from p2p_diloco.protocol.messages import (
    ContentReply,
    EntryAbsent,
    HeadsReply,
    Message,
    Opening,
    Pong,
    RosterReply,
    RowMean,
    SpanReply,
)
from p2p_diloco.protocol.roster import CertifiedRoster, vote_statement
from p2p_diloco.protocol.round import FragmentContribution
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.node import SwarmNode
from tests.swarm.swarm_peer import main

HUGE = 3e38
DAY_SECONDS = 86_400.0
Mutator = Callable[[SwarmNode, PeerId, Any], Sequence[Message]]


def resigned(node: SwarmNode, entry: Entry, **changes: Any) -> Entry:
    """Return an entry with other contents and this peer's signature."""
    changed = replace(entry, **changes)
    return replace(changed, signature=node.engine.me.sign(changed.statement()))


def is_own(node: SwarmNode, message: Message) -> bool:
    """Tell whether a message is an entry that this peer signed."""
    return isinstance(message, Entry) and resigned(node, message).signature == message.signature


def huge_payload(node: SwarmNode, entry: Entry) -> bytes:
    elements = node.engine.rules.span_elements[entry.span]
    return node._codecs.entry.encode(np.full(elements, HUGE, dtype=np.float32), rounding_seed=None)


def far_rounds(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign all own entries for rounds in the far future, of the right fragment."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    far = (1 << 60) - (1 << 60) % node.engine.rules.clock.num_fragments + message.span.fragment
    return (resigned(node, message, round=far),)


def one_round_ahead(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign all own entries for the fragment's next round."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, round=message.round + node.engine.rules.clock.num_fragments),)


def huge_entries(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign own entries whose elements are as large as a float32 can be."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, payload=huge_payload(node, message)),)


def two_entries(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign two entries for one span and round, and send one half of the peers the other one."""
    if not is_own(node, message) or to[0] % 2:
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, tokens=message.tokens + 1),)


def withheld_entries(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Make no entry known that this peer owns, and send no mean of its row."""
    return () if is_own(node, message) or isinstance(message, RowMean) else (message,)


def many_tokens(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Claim a million times as many tokens."""
    if isinstance(message, Opening) and message.steps:
        return (replace(message, tokens=message.tokens * 1_000_000),)
    return (message,)


def other_tips(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Name other tips than one's own, higher ones, without entries that lead there; serve zeros for them."""
    match message:
        case Heartbeat():
            heads = tuple(
                FragmentHead(round=head.round, digest=Digest(sha256(head.digest)[:SHORT_DIGEST_BYTES]))
                for head in message.heads
            )
            return (replace(message, heads=heads, signature=bytes(64)).signed(node.engine.me.sign),)
        case HeadsReply():
            higher = tuple(replace(h, height=h.height + 100, digest=sha256(h.digest)) for h in message.heads)
            return (replace(message, heads=higher),)
        case Entry() if not is_own(node, message):
            return (EntryAbsent(span=message.span, parent=message.parent),)
        case SpanReply():
            head = replace(message.head, height=message.head.height + 100, digest=sha256(message.head.digest))
            return (replace(message, head=head, piece=bytes(len(message.piece))),)
        case _:
            return (message,)


def other_contents(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Name other bytes for every tip, and serve such."""
    match message:
        case ContentReply():
            return (replace(message, digests=tuple((tip, sha256(content)) for tip, content in message.digests)),)
        case SpanReply():
            return (replace(message, piece=bytes(len(message.piece))),)
        case _:
            return (message,)


def a_day_ahead(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Answer pings a day ahead."""
    if isinstance(message, Pong):
        return (replace(message, clock_seconds=message.clock_seconds + DAY_SECONDS),)
    return (message,)


MUTATORS: dict[str, Mutator] = {
    "far-rounds": far_rounds,
    "one-round-ahead": one_round_ahead,
    "huge-entries": huge_entries,
    "two-entries": two_entries,
    "withheld-entries": withheld_entries,
    "many-tokens": many_tokens,
    "other-tips": other_tips,
    "other-contents": other_contents,
    "a-day-ahead": a_day_ahead,
}


def self_voted_rosters(node: SwarmNode, behind: int) -> RosterReply | None:
    """Return a degraded child of an earlier roster, or of the one in force, with this peer as its only voter."""
    chain = node.engine.book.chain()
    if len(chain) < behind + 2:
        return None
    parent = chain[-1 - behind]
    me = parent.roster.member(node.engine.me.peer) or node.engine.me.member()
    changes = {
        "parent": parent.roster.digest(),
        "k": parent.roster.k + 1,
        "degraded": True,
        "cycle": parent.roster.cycle + node.engine.rules.stalled_cycles,
        "members": (me,),
        "height": parent.roster.height + node.engine.rules.num_all_spans,
    }
    roster = replace(parent.roster, **changes)
    ballot = parent.ballot + 4
    vote = node.engine.me.sign(vote_statement(roster.digest(), ballot))
    return RosterReply(rosters=(CertifiedRoster(roster=roster, ballot=ballot, votes=((me.peer, vote),)),))


def install(lie: str, folder: Path) -> None:
    """Have what leaves this process pass the mutator, once the file `lie` is there."""
    begins = folder / "lie"
    honest = SwarmNode._post
    mutator = MUTATORS.get(lie, lambda node, to, message: (message,))
    state = {"last": 0.0, "lies": False}

    def lies() -> bool:
        state["lies"] = state["lies"] or begins.exists()
        return bool(state["lies"])

    def post(node: SwarmNode, to: PeerId, message: Message, deadline: float, **more: Any) -> None:
        if not lies():
            honest(node, to, message, deadline, **more)
            return
        for changed in mutator(node, to, message):
            honest(node, to, changed, deadline, **({} if changed is not message else more))
        if lie.startswith("self-voted") and isinstance(message, Heartbeat) and time.monotonic() > state["last"] + 0.2:
            state["last"] = time.monotonic()
            forged = self_voted_rosters(node, behind=5 if lie.endswith("old") else 0)
            for peer in node._transport.linked_peers() if forged is not None else ():
                assert forged is not None
                honest(node, peer, forged, deadline)

    SwarmNode._post = post  # type: ignore[assignment, method-assign]
    if lie == "huge-contributions":
        contribute = SwarmNode._contribute

        def huge(node: SwarmNode, contribution: FragmentContribution | None) -> None:
            if contribution is not None and lies():
                codec, sizes = node._codecs.contribution, node.engine.rules.span_elements
                spans = tuple(
                    replace(span, payload=codec.encode(np.full(sizes[span.span], HUGE, dtype=np.float32)), norm=HUGE)
                    for span in contribution.spans
                )
                contribution = replace(contribution, spans=spans)
            contribute(node, contribution)

        SwarmNode._contribute = huge  # type: ignore[method-assign]
    if lie == "longest-entries":
        reduced = Exchange.span_reduced

        def longest(exchange: Exchange, order: ReduceSpan, *made: Any) -> Entry | RowMean | str:
            head, entry = exchange._chains.heads.get(order.span), reduced(exchange, order, *made)
            if not isinstance(entry, Entry) or head is None or not lies():
                return entry
            changed = longest_entry(entry, head, exchange._rules)
            return replace(changed, signature=exchange._membership.me.sign(changed.statement()))

        Exchange.span_reduced = longest  # type: ignore[method-assign]


def longest_entry(entry: Entry, head: SpanHead, rules: RunRules) -> Entry:
    """Return an entry that moves every element, all one way, as far as the limits allow, and lifts the limits."""
    elements = rules.span_elements[entry.span]
    length = 0.99 * rules.entry_limit * head.radius / math.sqrt(elements)
    return replace(
        entry,
        payload=Int4Codec().encode(np.full(elements, length, dtype=np.float32)),
        median_norm=within_reach(math.inf, head.radius, RADIUS_BOUNDS),
        median_weight=within_reach(math.inf, head.median_weight, WEIGHT_BOUNDS),
    )


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.loads(Path(sys.argv[1]).read_text())
    install(order["lie"], Path(order["folder"]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(order))
