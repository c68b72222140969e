"""The rounds at one peer: contributes when one begins, reduces the spans it owns, closes when the next one begins."""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, Part, Report, Send, TakeSnapshot
from p2p_diloco.protocol.chain import ChainBook
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.messages import Opening, Refusal, SpanVector
from p2p_diloco.protocol.round import (
    Collection,
    FragmentContribution,
    ReductionRules,
    build_entry,
    collect_parts,
    contribution_messages,
    newcomers_of,
    refuse_opening,
    split_by_owner,
    still_expected,
)
from p2p_diloco.protocol.rules import RunRules

MOST_EARLY_SENDERS = 64


class Exchange:
    """What this peer does in the round in progress. A state machine without I/O.

    Contributions for the next round that come early, because clocks differ by a little, wait until it begins here.
    """

    def __init__(self, *, rules: RunRules, membership: Membership, chains: ChainBook) -> None:
        self._rules = rules
        self._membership = membership
        self._chains = chains
        self._reduction = ReductionRules(weight_clip=rules.weight_clip, radius_limit=rules.contribution_limit)
        self._parents: dict[tuple[int, SpanId], tuple[Digest, tuple[Part, ...]]] = {}
        self._early: dict[int, dict[PeerId, list[Opening | SpanVector]]] = {}
        self.collection: Collection | None = None
        self.is_over = False
        """The run's last round is over: no collection is begun, so nothing is void that nobody waited for."""

    def begin(self, round_index: int, contributes: bool) -> list[Action]:
        """Begin a round under the roster that governs it; ask the island for its contribution when it takes part."""
        self._parents.clear()
        governing = self._membership.book.governing(round_index)
        early, self._early = self._early, {}
        if governing is None or round_index < 0 or self.is_over:
            self.collection = None
            return []
        roster, grid = governing
        me = self._membership.me
        fragment = self._rules.clock.fragment(round_index)
        self.collection = Collection(
            round=round_index,
            fragment=fragment,
            roster=roster,
            grid=grid,
            owned=grid.owned(me.peer, fragment, self._rules.num_spans[fragment]),
            newcomers=newcomers_of(roster, self._membership.book.parent_of(roster)),
        )
        actions: list[Action] = []
        if contributes and me.trains and roster.member(me.peer) == me.member():
            deadline = self._rules.clock.contribute_by(round_index)
            actions.append(TakeSnapshot(round=round_index, fragment=fragment, deadline=deadline))
        for sender, messages in early.get(round_index, {}).items():
            for message in messages:
                actions += self.take(sender, message, self._rules.clock.begin(round_index))
        return actions

    def contribute(self, contribution: FragmentContribution, now: float) -> list[Action]:
        """Send the island's contribution to the owners of its spans, unless the time for it is over."""
        collection = self.collection
        clock = self._rules.clock
        if collection is None or collection.round != contribution.round or now > clock.contribute_by(collection.round):
            return []
        me = self._membership.me
        actions: list[Action] = []
        deadline = clock.reduce_by(collection.round)
        digest = collection.roster.digest()
        for owner, spans in split_by_owner(contribution, collection.grid).items():
            opening, vectors = contribution_messages(contribution, spans, digest, me.incarnation)
            messages: tuple[Opening | SpanVector, ...] = (opening, *vectors)
            if owner == me.peer:
                for message in messages:
                    actions += self.take(me.peer, message, now)
            else:
                actions += [Send(to=owner, message=message, deadline=deadline) for message in messages]
        return actions

    def take(self, sender: PeerId, message: Opening | SpanVector, now: float) -> list[Action]:
        """Collect a piece of a contribution; what does not fit is dropped and its sender told."""
        collection = self.collection
        current = self._rules.clock.round_at(now)
        # The clock may have reached a round that has not begun here yet: a busy machine ticks late.
        if message.round in (current, current + 1) and (collection is None or collection.round < message.round):
            self._keep_early(sender, message)
            return []
        if collection is None or message.round != collection.round:
            return [self._refusal(sender, message.round, "late or far too early", False, now)]
        if isinstance(message, Opening):
            return self._take_opening(collection, sender, message, now)
        return self._take_vector(collection, sender, message, now)

    def _keep_early(self, sender: PeerId, message: Opening | SpanVector) -> None:
        """Keep a message of the next round, as long as nobody can fill the memory with such."""
        fits = isinstance(message, Opening) or len(message.payload) == self._rules.payload_bytes.get(message.span)
        senders = self._early.setdefault(message.round, {})
        if not fits or (sender not in senders and len(senders) >= MOST_EARLY_SENDERS):
            return
        waiting = senders.setdefault(sender, [])
        if len(waiting) <= max(self._rules.num_spans):
            waiting.append(message)

    def _take_opening(self, collection: Collection, sender: PeerId, opening: Opening, now: float) -> list[Action]:
        reason = refuse_opening(opening, sender, collection)
        if reason is None:
            collection.openings[sender] = opening
            return []
        collection.refused.add(sender)
        newer = opening.roster != collection.roster.digest() and opening.roster in self._membership.book
        return [self._refusal(sender, opening.round, reason, newer, now)]

    def _take_vector(self, collection: Collection, sender: PeerId, vector: SpanVector, now: float) -> list[Action]:
        opening = collection.openings.get(sender)
        if opening is None or all(offer.index != vector.span.index for offer in opening.spans):
            return []
        expected = self._rules.payload_bytes.get(vector.span)
        if vector.span.fragment != collection.fragment or expected != len(vector.payload):
            collection.refused.add(sender)
            reason = f"{vector.span} came with {len(vector.payload)} bytes, {expected} expected"
            return [self._refusal(sender, vector.round, reason, False, now)]
        if vector.span not in collection.settled:
            collection.payloads.setdefault((sender, vector.span), vector.payload)
        return self._reduce_span(collection, vector.span, now, at_deadline=False)

    def tick(self, now: float) -> list[Action]:
        """Reduce at the deadline what has not been reduced before it."""
        collection = self.collection
        if collection is None or now < self._rules.clock.reduce_by(collection.round):
            return []
        actions: list[Action] = []
        for span in collection.owned:
            actions += self._reduce_span(collection, span, now, at_deadline=True)
        return actions

    def _reduce_span(self, collection: Collection, span: SpanId, now: float, *, at_deadline: bool) -> list[Action]:
        if span in collection.settled or span not in collection.owned:
            return []
        gone = frozenset(m.peer for m in collection.roster.members if self._membership.has_left(m))
        if not at_deadline and still_expected(collection, span, gone):
            return []
        head = self._chains.heads.get(span)
        found = collect_parts(collection, span, head, self._reduction)
        if isinstance(found, str) and not at_deadline:
            return []  # the entry that this owner lacks may still come
        collection.settled.add(span)
        if isinstance(found, str):
            return [Report(topic="void", text=f"{span} is void in round {collection.round}: {found}")]
        parent, reduce = found
        self._parents[collection.round, span] = (parent, reduce.parts)
        for part in reduce.parts:
            collection.payloads.pop((part.peer, span), None)
        return [reduce]

    def span_reduced(self, round_index: int, span: SpanId, sound: frozenset[PeerId], payload: bytes) -> Entry | str:
        """Return the signed entry of a span that the worker has averaged, or why it is void.

        Args:
            sound: peers whose contribution is in the mean.
        """
        collection = self.collection
        found = self._parents.pop((round_index, span), None)
        if collection is None or collection.round != round_index or found is None:
            return "the round was over before its mean was ready"
        parent, parts = found
        head = self._chains.heads.get(span)
        height = head.height + 1 if head is not None and head.digest == parent else 0
        if height == 0:
            return "the span moved on while its mean was taken"
        entry = build_entry(collection, parent, height, span, [p for p in parts if p.peer in sound], payload)
        if isinstance(entry, str):
            return entry
        return replace(entry, signature=self._membership.me.sign(entry.statement()))

    def close(self) -> list[Action]:
        """End the round: what is unsettled is void."""
        collection = self.collection
        if collection is None:
            return []
        missing = [
            short_peer_id(member.peer)
            for member in collection.roster.members
            if collection.owned and member.peer not in collection.openings
        ]
        if not missing or self._membership.me.peer not in collection.openings:
            return []
        names = ", ".join(missing)
        text = f"round {collection.round}: no contribution from {names}; the mean is of the others"
        return [Report(topic="missing", text=text)]

    def _refusal(self, to: PeerId, round_index: int, reason: str, newer: bool, now: float) -> Action:
        if to == self._membership.me.peer:
            return Report(topic="refused", text=f"round {round_index}: own contribution refused: {reason}")
        message = Refusal(round=round_index, newer_roster=newer, reason=reason.encode()[:512])
        return Send(to=to, message=message, deadline=now + self._rules.clock.round_seconds)
