"""A member that lies, in its own process: `python lying_peer.py ORDER.json`; its order also names a `lie`.

It is an honest peer, except that each message passes through a mutator on its way to the transport. Lies begin when the
file `lie` appears in its folder. It writes its place in the roster and the number of lies sent, by peer and kind, to
`lies.json` there.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from p2p_diloco.codec.codec import Int4Codec
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.protocol.actions import ReduceSpan
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry, pack_included
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.messages import (
    ContentRequest,
    EntryRequest,
    HeadsRequest,
    Message,
    Ping,
    RosterRequest,
    RowMean,
    SpanRequest,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span_log import RADIUS_BOUNDS, RADIUS_MOVED, WEIGHT_BOUNDS, WEIGHT_MOVED, SpanHead, within_reach
from simulator.lies import (
    Change,
    a_day_ahead,
    degraded_child,
    false_bytes,
    false_contents,
    false_state,
    lone_vote,
    no_entries,
)
from tests.swarm.swarm_peer import main

HUGE = 3e38
CLAIMED_TOKENS = 10**12
FORGED_EVERY_SECONDS = 0.2
QUESTIONS = (ContentRequest, EntryRequest, HeadsRequest, Ping, RosterRequest, SpanRequest)
Mutator = Callable[[SwarmNode, PeerId, Any], Sequence[Message]]


def resigned(node: SwarmNode, entry: Entry, **changes: Any) -> Entry:
    """Return an entry with other contents and this peer's signature."""
    changed = replace(entry, **changes)
    return replace(changed, signature=node.engine.me.sign(changed.statement()))


def is_own(node: SwarmNode, message: Message) -> bool:
    """Return whether a message is an entry that this peer signed."""
    return isinstance(message, Entry) and resigned(node, message).signature == message.signature


def huge_payload(node: SwarmNode, entry: Entry) -> bytes:
    elements = node.engine.rules.span_elements[entry.span]
    return node.vectors.codecs.entry.encode(np.full(elements, HUGE, dtype=np.float32), rounding_seed=None)


def own_round(node: SwarmNode, entry: Entry, first: int) -> int:
    """Return the earliest round from `first` on in which this peer owns the span of its entry under the same roster."""
    num_fragments = node.engine.rules.clock.num_fragments
    first += (entry.span.fragment - first) % num_fragments

    def is_own_in(round_index: int) -> bool:
        grid = node.engine.book.folded(entry.roster, round_index)[1]
        return grid.owner(entry.span) == node.engine.me.peer

    return next(filter(is_own_in, count(first, num_fragments)))


def far_rounds(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign all own entries for rounds in the distant future in which this peer would own the same span."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, round=own_round(node, message, 1 << 60)),)


def one_round_ahead(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign all own entries for the next round in which this peer owns the same span."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, round=own_round(node, message, message.round + 1)),)


def huge_entries(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign own entries whose elements are as large as a float32 can be."""
    if not is_own(node, message):
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, payload=huge_payload(node, message)),)


def two_entries(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Sign two entries for one span and round, and send one half of the linked members the other one."""
    roster = node.engine.book.in_force
    members = sorted(roster.peers() & node.transport.linked_peers()) if roster is not None else []
    if not is_own(node, message) or to in members[: len(members) // 2]:
        return (message,)
    assert isinstance(message, Entry)
    return (resigned(node, message, tokens=message.tokens + 1),)


def told(change: Change) -> Mutator:
    """Return a mutator that changes each message into another, or drops it."""

    def mutate(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
        changed = change(message)
        return (changed,) if changed is not None else ()

    return mutate


def other_tips(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Name tips far above its own, without entries that lead there, and serve garbage for them."""
    return (false_state(message, node.engine.me),)


def silent(node: SwarmNode, to: PeerId, message: Message) -> Sequence[Message]:
    """Request what members have, and send nothing else."""
    return (message,) if isinstance(message, QUESTIONS) else ()


MUTATORS: dict[str, Mutator] = {
    "far-rounds": far_rounds,
    "one-round-ahead": one_round_ahead,
    "huge-entries": huge_entries,
    "two-entries": two_entries,
    "withheld-entries": told(no_entries),
    "other-tips": other_tips,
    "other-contents": told(lambda message: false_contents(false_bytes(message))),
    "a-day-ahead": told(a_day_ahead),
    "self-voted-dropped": silent,
    "entries-dropped": silent,
}


def self_voted(node: SwarmNode, *parents: CertifiedRoster) -> Sequence[Message]:
    """Return a degraded child of each roster, valid except that this peer is its only voter.

    A roster that is too recent for such a child is left out.
    """
    me, rules = node.engine.me, node.engine.rules
    round_index = rules.clock.round_at(node.now())
    cycle, ballot = rules.clock.cycle(round_index), rules.clock.ballot_at(node.now())
    forged: list[Message] = []
    for parent in (each.roster for each in parents):
        if cycle < parent.cycle + rules.stalled_cycles:
            continue
        member, height = parent.member(me.peer) or parent.members[0], parent.height + rules.num_all_spans
        forged.append(lone_vote(degraded_child(parent, member, cycle, height=height), ballot, me.peer, me.sign))
    return forged


def latest_listing(node: SwarmNode) -> CertifiedRoster | None:
    """Return the latest roster that lists this peer, if it has been dropped since; otherwise None."""
    chain, me = node.engine.book.chain(), node.engine.me.peer
    if not chain or chain[-1].roster.member(me) is not None:
        return None
    return next((each for each in reversed(chain) if each.roster.member(me) is not None), None)


def self_voted_child(node: SwarmNode) -> Sequence[Message]:
    """Vote alone for a child of the roster in force."""
    return self_voted(node, node.engine.book.chain()[-1])


def self_voted_branch(node: SwarmNode) -> Sequence[Message]:
    """Vote alone for a child of the oldest roster that lists this peer."""
    me = node.engine.me.peer
    return self_voted(node, *[each for each in node.engine.book.chain() if each.roster.member(me) is not None][:1])


def self_voted_past(node: SwarmNode) -> Sequence[Message]:
    """Vote alone for a child of an earlier roster that lists this peer, with as many entries as are possible since."""
    engine, me = node.engine, node.engine.me
    cycle = engine.rules.clock.cycle(engine.rules.clock.round_at(node.now()))
    forged: list[Message] = []
    for parent in (each.roster for each in engine.book.chain()[:-1]):
        member = parent.member(me.peer)
        if member is not None and cycle >= parent.cycle:
            height = parent.height + (cycle - parent.cycle + 2) * engine.rules.num_all_spans
            child = degraded_child(parent, member, cycle, height=height)
            forged.append(lone_vote(child, engine.rules.clock.ballot_at(node.now()), me.peer, me.sign))
    return forged


def self_voted_after_being_dropped(node: SwarmNode) -> Sequence[Message]:
    """Vote alone, as an ex-member, for children of the latest roster that listed this peer and of the one in force."""
    listing = latest_listing(node)
    return self_voted(node, listing, node.engine.book.chain()[-1]) if listing is not None else ()


def entries_after_being_dropped(node: SwarmNode) -> Sequence[Message]:
    """Sign entries of this round for the spans that this peer would own under the latest roster that listed it."""
    listing, engine = latest_listing(node), node.engine
    if listing is None:
        return ()
    round_index, digest = engine.rules.clock.round_at(node.now()), listing.roster.digest()
    grid = engine.book.folded(digest, round_index)[1]
    members = listing.roster.members
    trainers = {place for place, member in enumerate(members) if member.trains}
    return [
        resigned(
            node,
            Entry(
                run=engine.rules.run,
                round=round_index,
                span=span,
                parent=head.digest,
                height=head.height + 1,
                roster=digest,
                present=pack_included(set(range(len(members))), len(members)),
                included=pack_included(trainers, len(members)),
                weights=(head.median_weight,) * len(trainers),
                tokens=1,
                median_norm=head.radius,
                median_weight=head.median_weight,
                payload=node.vectors.codecs.entry.encode(
                    np.full(engine.rules.span_elements[span], 1e-6, dtype=np.float32), rounding_seed=None
                ),
                signature=bytes(64),
            ),
        )
        for span, head in sorted(engine.chains.heads.items())
        if span.fragment == engine.rules.clock.fragment(round_index) and grid.owner(span) == engine.me.peer
    ]


FORGERS: dict[str, Callable[[SwarmNode], Sequence[Message]]] = {
    "self-voted": self_voted_child,
    "self-voted-old": self_voted_branch,
    "self-voted-past": self_voted_past,
    "self-voted-dropped": self_voted_after_being_dropped,
    "entries-dropped": entries_after_being_dropped,
}
"""Functions that return messages to send to all linked peers in addition to the usual ones."""


class Record:
    """A record of the lies of this process: `lies.json` in its folder."""

    def __init__(self, folder: Path) -> None:
        self.told: dict[str, Counter[str]] = {}
        self._path = folder / "lies.json"
        self._written = 0.0

    def tell(self, message: Message | FragmentContribution, to: PeerId | None = None) -> None:
        """Count a lie sent to a peer, or to any receiver."""
        name = short_peer_id(to) if to is not None else "all"
        self.told.setdefault(name, Counter())[type(message).__name__] += 1

    def write(self, node: SwarmNode) -> None:
        """Write the record, a few times a second."""
        if time.monotonic() < self._written + 0.1:
            return
        self._written = time.monotonic()
        roster = node.engine.book.in_force
        me = roster.member(node.engine.me.peer) if roster is not None else None
        draft = self._path.with_suffix(".draft")
        place = {"is_member": me is not None, "counts": me is not None and me.counts}
        place["reduces"] = me is not None and me.reduces
        draft.write_text(json.dumps({**place, "told": self.told}))
        draft.replace(self._path)


def install(lie: str, folder: Path) -> None:
    """Pass all outgoing messages through the mutator, once the file `lie` exists."""
    begins = folder / "lie"
    honest = SwarmNode._post
    mutator = MUTATORS.get(lie, lambda node, to, message: (message,))
    record = Record(folder)
    state = {"next": 0.0, "lies": False}

    def lies() -> bool:
        state["lies"] = state["lies"] or begins.exists()
        return bool(state["lies"])

    def post(node: SwarmNode, to: PeerId, message: Message, deadline: float, **more: Any) -> None:
        record.write(node)
        if not lies():
            honest(node, to, message, deadline, **more)
            return
        sent = mutator(node, to, message)
        is_lie = mutator is not silent and (len(sent) != 1 or sent[0] is not message)
        if is_lie and to in node.transport.linked_peers():
            record.tell(message, to)
        for changed in sent:
            honest(node, to, changed, deadline, **({} if changed is not message else more))
        if lie in FORGERS and isinstance(message, Heartbeat) and time.monotonic() > state["next"]:
            state["next"] = time.monotonic() + FORGED_EVERY_SECONDS
            for forged in FORGERS[lie](node):
                for peer in sorted(node.transport.linked_peers()):
                    honest(node, peer, forged, deadline)
                    record.tell(forged, peer)

    SwarmNode._post = post  # type: ignore[assignment, method-assign]
    if lie in CONTRIBUTORS:
        contribute = SwarmNode._contribute

        def false_contribution(node: SwarmNode, contribution: FragmentContribution | None) -> None:
            if contribution is not None and lies():
                contribution = CONTRIBUTORS[lie](node, contribution)
                record.tell(contribution)
            contribute(node, contribution)

        SwarmNode._contribute = false_contribution  # type: ignore[method-assign]
    if lie in OWNERS:
        reduced = Exchange.span_reduced

        def false_entry(exchange: Exchange, order: ReduceSpan, *made: Any) -> Entry | RowMean | str:
            head, entry = exchange.chains.heads.get(order.span), reduced(exchange, order, *made)
            if not isinstance(entry, Entry) or head is None or not lies():
                return entry
            changed = OWNERS[lie](entry, head, exchange.rules)
            record.tell(changed)
            return replace(changed, signature=exchange.membership.local.me.sign(changed.statement()))

        Exchange.span_reduced = false_entry  # type: ignore[method-assign]


def huge_contribution(node: SwarmNode, contribution: FragmentContribution) -> FragmentContribution:
    """Contribute elements as large as a float32 can be."""
    codec, sizes = node.vectors.codecs.contribution, node.engine.rules.span_elements
    spans = tuple(
        replace(span, payload=codec.encode(np.full(sizes[span.span], HUGE, dtype=np.float32)), norm=HUGE)
        for span in contribution.spans
    )
    return replace(contribution, spans=spans)


def flipped(node: SwarmNode, contribution: FragmentContribution, *, is_longest: bool = False) -> FragmentContribution:
    """Contribute the opposite of what was learnt, and claim 10^12 tokens.

    Args:
        is_longest: whether each vector is made as long as is accepted.
    """
    codec, rules, spans = node.vectors.codecs.contribution, node.engine.rules, []
    for span in contribution.spans:
        vector_N = -codec.decode(span.payload, rules.span_elements[span.span])
        if is_longest:
            limit = node.engine.chains.heads[span.span].norm_limit(rules.contribution_limit)
            vector_N *= 0.95 * limit / max(float(np.linalg.norm(vector_N)), 1e-30)
        spans.append(replace(span, payload=codec.encode(vector_N)))
    return replace(contribution, tokens=CLAIMED_TOKENS, spans=tuple(spans))


def opposite_entry(entry: Entry, head: SpanHead, rules: RunRules) -> Entry:
    """Return an entry with minus the mean."""
    codec = Int4Codec()
    return replace(entry, payload=codec.encode(-codec.decode(entry.payload, rules.span_elements[entry.span])))


def longest_entry(entry: Entry, head: SpanHead, rules: RunRules) -> Entry:
    """Return an entry that moves every element in one direction as far as the limits allow, and raises the limits."""
    elements = rules.span_elements[entry.span]
    length = 0.99 * rules.entry_limit * head.radius / math.sqrt(elements)
    return replace(
        entry,
        payload=Int4Codec().encode(np.full(elements, length, dtype=np.float32)),
        median_norm=within_reach(math.inf, head.radius, RADIUS_BOUNDS, RADIUS_MOVED),
        median_weight=within_reach(math.inf, head.median_weight, WEIGHT_BOUNDS, WEIGHT_MOVED),
    )


CONTRIBUTORS: dict[str, Callable[[SwarmNode, FragmentContribution], FragmentContribution]] = {
    "huge-contributions": huge_contribution,
    "flipped": flipped,
    "flipped-and-longest": partial(flipped, is_longest=True),
}
"""Functions that return what to contribute in place of the island's contribution."""
OWNERS: dict[str, Callable[[Entry, SpanHead, RunRules], Entry]] = {
    "longest-entries": longest_entry,
    "opposite-entries": opposite_entry,
}
"""Functions that return the entry to sign in place of the true one."""


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.loads(Path(sys.argv[1]).read_text())
    install(order["lie"], Path(order["folder"]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(order))
