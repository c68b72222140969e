"""One peer's part in each round: contribute, average for its row, finish the spans that it owns, close the round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, ReduceSpan, Report, RequestContribution, RoundClosed, Send, Stage
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.round import (
    NOTHING_MEASURED,
    FragmentContribution,
    MeanInputs,
    OwnerRound,
    ReducerRound,
    contribution_messages,
    gather_contributions,
    has_trained,
    is_sending,
    newcomers_of,
    refuse_opening,
    refuse_row_mean,
    row_members,
    split_by_reducer,
    still_expected,
)
from p2p_diloco.protocol.round.traffic import UploadBudget
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry, Inclusion, build_entry, pack_included
from p2p_diloco.protocol.wire.messages import Opening, Refusal, RowMean, SpanVector
from p2p_diloco.protocol.wire.roster import Roster

Piece = Opening | SpanVector | RowMean
MOST_EARLY_SENDERS = 64
"""Maximum number of senders outside the roster in force whose openings for the next round are kept."""


class Exchange:
    """Takes part in the round in progress. A state machine without I/O.

    Clocks differ slightly, so contributions to the next round may arrive early. They wait until it begins here.
    """

    def __init__(self, *, rules: RunRules, membership: Membership, chains: ChainBook) -> None:
        self.rules = rules
        self.membership = membership
        self.chains = chains
        self._gathered: dict[tuple[Stage, SpanId], MeanInputs] = {}
        self._early: dict[int, dict[PeerId, list[Piece]]] = {}
        self.collection: ReducerRound | None = None
        self.finish: OwnerRound | None = None
        self._upload_budget = UploadBudget(rules=rules, me=membership.local.peer)
        self._is_awaited = False
        """Whether the island was asked for its contribution to the round in progress and has not answered."""
        self._left_out: frozenset[SpanId] = frozenset()
        self._named: dict[SpanId, Digest] = {}
        self._sent: dict[SpanId, tuple[int, bytes | memoryview]] = {}
        self.asked_in = self.made_in = -1
        """The last rounds in which the island was asked for a contribution, and in which it made one in time."""

    def begin(self, round_index: int, contributes: bool, left_out: frozenset[SpanId] = frozenset()) -> list[Action]:
        """Begin a round under the roster that governs it. Ask the island for its contribution if it takes part.

        Args:
            left_out: spans to which it does not contribute, because it is still fetching earlier entries.
        """
        self._gathered.clear()
        self.collection = self.finish = None
        self._is_awaited = False
        self._left_out = left_out
        self._named = {}
        long_ago = round_index - 2 * self.rules.clock.num_fragments
        self._sent = {span: sent for span, sent in self._sent.items() if sent[0] > long_ago}
        self.membership.votes.round_begun(round_index)
        governing = self.membership.book.governing(round_index)
        early, self._early = self._early, {}
        conditions = self.membership.local.conditions
        is_over = conditions.last_round is not None and round_index > conditions.last_round
        if governing is None or round_index < 0 or is_over:  # no round begins after the last: no span is skipped
            return []
        roster, grid = governing
        me = self.membership.local.me
        collection = self._open(round_index, roster, grid)
        fragment = self.rules.clock.fragment(round_index)
        actions: list[Action] = []
        listed = roster.member(me.peer)
        if contributes and listed is not None and listed.incarnation == me.incarnation:
            if not self.membership.votes.may_name_parents(collection.roster_digest, round_index):
                actions += self._keep_silent(collection)
            elif not me.trains or conditions.is_paused:
                self.membership.votes.parents_named(round_index)
                actions += self._come_empty_handed(collection, self.rules.clock.begin(round_index))
            else:
                deadline = self.rules.clock.contribute_by(round_index)
                spans = self._upload_budget.choose(collection, conditions, left_out)
                actions.append(
                    RequestContribution(round=round_index, fragment=fragment, deadline=deadline, spans=spans)
                )
                self._is_awaited, self.asked_in = True, round_index
                self.membership.votes.parents_named(round_index)
        for sender, messages in early.get(round_index, {}).items():
            for message in messages:
                actions += self.take(sender, message, self.rules.clock.begin(round_index))
        return actions

    def _open(self, round_index: int, roster: Roster, grid: Grid) -> ReducerRound:
        """Begin a collection under `roster`."""
        book, me = self.membership.book, self.membership.local.peer
        fragment = self.rules.clock.fragment(round_index)
        num_spans = self.rules.num_spans[fragment]
        row, digest, clock = grid.row_for(me), roster.digest(), self.rules.clock
        first_cycle = clock.cycle(book.last_before(digest) + 1)
        self.collection = collection = ReducerRound(
            round=round_index,
            fragment=fragment,
            roster=roster,
            roster_digest=digest,
            grid=grid,
            row=row,
            members=row_members(roster, grid, row),
            reduced=grid.reduced(me, fragment, num_spans),
            newcomers=newcomers_of(roster, book.parent_of(roster), clock.cycle(round_index), first_cycle),
        )
        owned = () if collection.is_one_row else grid.owned(me, fragment, num_spans)
        self.finish = OwnerRound(collection=collection, owned=owned)
        return collection

    def contribute(self, contribution: FragmentContribution, now: float) -> list[Action]:
        """Send the island's contribution to the reducers of its row, unless it is too late.

        All openings are sent first: they make this peer count as present, whatever happens to its vectors.
        """
        collection = self.collection
        deadline = self.rules.clock.contribute_by(contribution.round)
        if not self._is_awaited or collection is None or collection.round != contribution.round or now > deadline:
            return []
        if self.membership.local.conditions.is_paused:
            return self._come_empty_handed(collection, now)
        self.made_in = collection.round
        if collection.is_one_row:
            self._sent.update({sent.span: (contribution.round, sent.payload) for sent in contribution.spans})
        return self._announce_and_send(collection, contribution, now)

    def _come_empty_handed(self, collection: ReducerRound, now: float) -> list[Action]:
        """Send openings without a contribution, for example if the island reached no step border in time."""
        nothing = FragmentContribution(
            round=collection.round, fragment=collection.fragment, tokens=0, steps=0, spans=()
        )
        return self._announce_and_send(collection, nothing, now)

    def _keep_silent(self, collection: ReducerRound) -> list[Action]:
        """Send openings that name no parent, so that reducers do not wait for this peer."""
        fragment, now = collection.fragment, self.rules.clock.begin(collection.round)
        self._left_out = frozenset(SpanId(fragment, index) for index in range(self.rules.num_spans[fragment]))
        text = (
            f"round {collection.round}: no contribution under roster {collection.roster.k}, because this peer has "
            "voted for the next roster and waits for its certificate"
        )
        reports = [] if self.membership.local.leaving else [Report(topic="roster", text=text)]
        return [*reports, *self._come_empty_handed(collection, now)]

    def _announce_and_send(
        self, collection: ReducerRound, contribution: FragmentContribution, now: float
    ) -> list[Action]:
        self._is_awaited = False
        me, clock = self.membership.local.me, self.rules.clock
        openings: list[tuple[PeerId, Piece]] = []
        pieces: list[tuple[PeerId, Piece]] = []
        shares = split_by_reducer(contribution, collection.grid, collection.row)
        held_back = self._held_back(collection, contribution)
        self._named = {encoded.span: encoded.parent for encoded in contribution.spans}
        self._named.update(pair for held in held_back.values() for pair in held.items())
        is_capped = self.membership.local.conditions.upload_bytes_per_second is not None
        for reducer in self._reducers(collection):
            spans, held = shares.get(reducer, []), held_back.get(reducer, {})
            # Without an opening, a reducer would wait for this peer until the deadline. An empty one prevents that.
            if spans or held or self._left_out or is_capped:
                opening, vectors = contribution_messages(
                    contribution, spans, collection.roster_digest, me.incarnation, held
                )
                openings.append((reducer, opening))
                pieces += [(reducer, vector) for vector in vectors]
        actions: list[Action] = []
        for reducer, piece in (*openings, *pieces):
            if reducer == me.peer:
                actions += self.take(me.peer, piece, now)
            else:
                actions.append(Send(to=reducer, message=piece, deadline=clock.reduce_by(collection.round)))
        return actions

    def _held_back(
        self, collection: ReducerRound, contribution: FragmentContribution
    ) -> dict[PeerId, dict[SpanId, Digest]]:
        """Return, by reducer, the tips of the spans that are not sent: this peer counts as present for those too.

        Spans whose log has already reached the round are not included: there is nothing left to agree on. Nor are spans
        that are left out: their right tip is being fetched.
        """
        held: dict[PeerId, dict[SpanId, Digest]] = {}
        unsaid = {encoded.span for encoded in contribution.spans} | self._left_out
        for index in range(self.rules.num_spans[collection.fragment]):
            span = SpanId(collection.fragment, index)
            head, reducer = self.chains.heads.get(span), collection.grid.reducer(span, collection.row)
            if span not in unsaid and head is not None and head.round < collection.round:
                held.setdefault(reducer, {})[span] = head.digest
        return held

    def has_named(self, span: SpanId, parent: Digest, before: int) -> bool:
        """Return whether this peer has named `parent` in the round in progress, if that is later than `before`."""
        collection = self.collection
        return collection is not None and before < collection.round and self._named.get(span) == parent

    def take_sent(self, entry: Entry) -> bytes | memoryview | None:
        """Return what this peer sent for an entry's span and round, if it is still here, and drop it."""
        sent = self._sent.get(entry.span)
        if sent is None or sent[0] > entry.round:
            return None
        del self._sent[entry.span]
        return sent[1] if sent[0] == entry.round else None

    def _reducers(self, collection: ReducerRound) -> list[PeerId]:
        """Return the reducers of this peer's row, each once."""
        return list(dict.fromkeys(column[collection.row] for column in collection.grid.columns))

    def take(self, sender: PeerId, message: Piece, now: float) -> list[Action]:
        """Collect a piece of a contribution or the mean of a row. One that does not fit is dropped, with a refusal."""
        collection = self.collection
        current = self.rules.clock.round_at(now)
        # The clock may be in a round that has not begun here yet, because a busy machine ticks late.
        if message.round in (current, current + 1) and (collection is None or collection.round < message.round):
            self._keep_early(sender, message)
            return []
        if collection is None or message.round != collection.round:
            return [self._refusal(sender, message.round, "late or far too early", False, now)]
        if isinstance(message, Opening):
            return self._take_opening(collection, sender, message, now)
        if isinstance(message, SpanVector):
            return self._take_vector(collection, sender, message, now)
        return self._take_row_mean(sender, message, now)

    def _keep_early(self, sender: PeerId, message: Piece) -> None:
        """Keep a message for the next round, within limits, so that no sender can fill the memory."""
        senders = self._early.setdefault(message.round, {})
        if not self._is_member(sender):
            # It may be a newcomer on a roster that has not arrived yet. Its vectors would take too much memory.
            strangers = sum(not self._is_member(peer) for peer in senders)
            if not isinstance(message, Opening) or (sender not in senders and strangers >= MOST_EARLY_SENDERS):
                return
        elif not isinstance(message, Opening) and len(message.payload) > (self._expected_bytes(message) or 0):
            return
        waiting = senders.setdefault(sender, [])
        if len(waiting) <= max(self.rules.num_spans):
            waiting.append(message)

    def _is_member(self, peer: PeerId) -> bool:
        roster = self.membership.book.in_force
        return roster is not None and roster.member(peer) is not None

    def _expected_bytes(self, message: SpanVector | RowMean) -> int | None:
        sizes = self.rules.payload_bytes if isinstance(message, SpanVector) else self.rules.row_mean_bytes
        return sizes.get(message.span)

    def _take_opening(self, collection: ReducerRound, sender: PeerId, opening: Opening, now: float) -> list[Action]:
        reason = refuse_opening(opening, sender, collection)
        if reason is None:
            collection.openings[sender] = opening
            unsent = [span for span in collection.reduced if not is_sending(opening, span)]
            return [action for span in unsent for action in self._reduce_span(collection, span, now, at_deadline=False)]
        collection.refused.add(sender)
        newer = opening.roster != collection.roster_digest and opening.roster in self.membership.book
        return [self._refusal(sender, opening.round, reason, newer, now)]

    def _take_vector(self, collection: ReducerRound, sender: PeerId, vector: SpanVector, now: float) -> list[Action]:
        opening = collection.openings.get(sender)
        if opening is None or not is_sending(opening, vector.span):
            return []
        expected = self._expected_bytes(vector)
        if vector.span.fragment != collection.fragment or expected != len(vector.payload):
            collection.refused.add(sender)
            reason = f"{vector.span} came with {len(vector.payload)} bytes, {expected} expected"
            return [self._refusal(sender, vector.round, reason, False, now)]
        if vector.span not in collection.settled:
            collection.payloads.setdefault((sender, vector.span), vector.payload)
        return self._reduce_span(collection, vector.span, now, at_deadline=False)

    def _take_row_mean(self, sender: PeerId, mean: RowMean, now: float) -> list[Action]:
        finish = self.finish
        assert finish is not None, "it is set together with the collection"
        reason = refuse_row_mean(mean, sender, finish, self._expected_bytes(mean))
        if reason is not None:
            return [self._refusal(sender, mean.round, reason, False, now)]
        finish.add(mean)
        return self._finish_span(finish, mean.span, now, at_deadline=False)

    def tick(self, now: float) -> list[Action]:
        """At the deadlines, average the spans that have not been averaged yet."""
        collection, finish = self.collection, self.finish
        if collection is None or finish is None:
            return []
        actions: list[Action] = []
        if self._is_awaited and now >= self.rules.clock.contribute_by(collection.round):
            actions += self._come_empty_handed(collection, now)
        if now < self.rules.clock.reduce_by(collection.round):
            return actions
        for span in collection.reduced:
            actions += self._reduce_span(collection, span, now, at_deadline=True)
        if now >= self.rules.clock.finish_by(collection.round):
            for span in finish.owned:
                actions += self._finish_span(finish, span, now, at_deadline=True)
        return actions

    def _reduce_span(self, collection: ReducerRound, span: SpanId, now: float, *, at_deadline: bool) -> list[Action]:
        if span in collection.settled or span not in collection.reduced:
            return []
        gone = frozenset(
            m.peer for m in collection.members.values() if self.membership.declarations.has_left(m.peer, m.incarnation)
        )
        if not at_deadline and still_expected(collection, span, gone):
            return []
        found = gather_contributions(collection, span, self.chains.heads.get(span), self.rules)
        actions = self._settle(collection.settled, found, span, now, at_deadline=at_deadline)
        if span in collection.settled:
            awaited = (peer for peer, opening in collection.openings.items() if is_sending(opening, span))
            collection.overdue.update(peer for peer in awaited if (peer, span) not in collection.payloads)
        for reduce in actions:
            for part in reduce.parts if isinstance(reduce, ReduceSpan) else ():
                collection.payloads.pop((part.peer, span), None)
        return actions

    def _finish_span(self, finish: OwnerRound, span: SpanId, now: float, *, at_deadline: bool) -> list[Action]:
        if span in finish.settled or not (at_deadline or finish.is_complete(span)):
            return []
        found = finish.gather(span, self.chains.heads.get(span), self.rules)
        return self._settle(finish.settled, found, span, now, at_deadline=at_deadline)

    def _settle(
        self, settled: set[SpanId], found: MeanInputs | str, span: SpanId, now: float, *, at_deadline: bool
    ) -> list[Action]:
        """Order the mean, or report that the span is skipped. Before the deadline, missing parts may still arrive."""
        if isinstance(found, str) and not at_deadline:
            return []  # the parent that this peer lacks may still arrive
        settled.add(span)
        if isinstance(found, str):
            assert self.collection is not None
            return [Report(topic="skipped", text=f"skipped {span} in round {self.collection.round}: {found}")]
        if not found.reduce.parts:
            assert self.collection is not None
            return self.hand_up(self._row_mean(self.collection, found, found.inclusion_of(frozenset()), b""), now)
        self._gathered[found.reduce.stage, span] = found
        return [found.reduce]

    def hand_up(self, mean: RowMean, now: float) -> list[Action]:
        """Send the mean of this row to the span's owner."""
        assert self.collection is not None, "a mean belongs to the round in progress"
        owner, me = self.collection.grid.owner(mean.span), self.membership.local.peer
        if owner == me:
            return self.take(me, mean, now)
        return [Send(to=owner, message=mean, deadline=self.rules.clock.finish_by(mean.round))]

    def span_reduced(
        self,
        order: ReduceSpan,
        sound: frozenset[PeerId],
        payload: bytes | memoryview,
        measured: Mapping[PeerId, float] = NOTHING_MEASURED,
    ) -> Entry | RowMean | str:
        """Turn the worker's mean into the mean of a row or the signed entry, or return why the span is skipped.

        Args:
            sound: senders whose part is in the mean.
            measured: norms of the parts of contributors.
        """
        collection = self.collection
        gathered = self._gathered.pop((order.stage, order.span), None)
        if collection is None or collection.round != order.round or gathered is None:
            return "the round was over before its mean was ready"
        if order.stage is Stage.ROW:
            return self._row_mean(collection, gathered, gathered.inclusion_of(sound, measured), payload)
        head = self.chains.heads.get(order.span)
        if head is None or head.digest != gathered.parent:
            return "the span moved on while its mean was computed"
        entry = build_entry(
            collection.roster,
            collection.roster_digest,
            order.round,
            order.span,
            head,
            gathered.inclusion_of(sound, measured),
            payload,
            owner=collection.roster.position(self.membership.local.peer),
        )
        if isinstance(entry, str):
            return entry
        return replace(entry, signature=self.membership.local.me.sign(entry.statement()))

    def _row_mean(
        self, collection: ReducerRound, gathered: MeanInputs, inclusion: Inclusion, payload: bytes | memoryview
    ) -> RowMean:
        """Return the mean of this row. If no contribution counts, it has no vector, and only names who was present."""
        if not sum(inclusion.weights) > 0:
            inclusion, payload = inclusion.left_out(), b""
        return RowMean(
            round=collection.round,
            span=gathered.reduce.span,
            roster=collection.roster_digest,
            parent=gathered.parent,
            row=collection.row,
            present=pack_included(set(inclusion.present), len(collection.roster.members)),
            included=pack_included(set(inclusion.places), len(collection.roster.members)),
            weights=inclusion.weights,
            norms=inclusion.norms,
            tokens=inclusion.tokens,
            payload=payload,
        )

    def close(self) -> list[Action]:
        """End the round. Spans that are not settled are skipped.

        Also report members whose vectors did not arrive. They count as present, so no roster ever drops them for that.
        """
        collection, me = self.collection, self.membership.local.peer
        if collection is None or self.membership.local.conditions.is_paused:
            return []
        if me not in collection.openings:
            return []
        missing = [
            "this peer" if member.peer == me else short_peer_id(member.peer)
            for member in collection.members.values()
            if collection.reduced
            and member.trains
            and not self._is_known_idle(member.peer)
            and not has_trained(collection.openings.get(member.peer))
        ]
        late = [f"{num} from {short_peer_id(peer)}" for peer, num in sorted(collection.overdue.items())]
        texts = (
            (missing, f"no contribution from {', '.join(missing)}"),
            (
                late,
                f"of the {len(collection.reduced)} spans averaged here, {', '.join(late)} did not arrive in time",
            ),
        )
        return [
            Report(topic="missing", text=f"round {collection.round}: {text}; averaged the others")
            for who, text in texts
            if who
        ]

    def _is_known_idle(self, peer: PeerId) -> bool:
        """Return whether a member reports that it is not ready: it catches up, or its owner has paused it."""
        view = self.membership.liveness.views.get(peer)
        return view is not None and not view.heartbeat.ready

    def _refusal(self, to: PeerId, round_index: int, reason: str, newer: bool, now: float) -> Action:
        if to == self.membership.local.peer:
            return Report(topic="refused", text=f"round {round_index}: own contribution left out: {reason}")
        message = Refusal(round=round_index, newer_roster=newer, reason=reason.encode()[:512])
        return Send(to=to, message=message, deadline=now + self.rules.clock.round_seconds)


class RoundDriver:
    """Tracks the round that this peer is in and the outcome of recent rounds. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, membership: Membership, chains: ChainBook, exchange: Exchange) -> None:
        self._rules = rules
        self._membership = membership
        self._chains = chains
        self._exchange = exchange
        self.round: int | None = None
        self._last_tick: float | None = None
        self._included_in_round = 0

    def tick(self, now: float) -> int | None:
        """Return the round that has begun since the last tick; None if none has. Detect sleep and clock changes."""
        has_jumped = self._last_tick is not None and abs(now - self._last_tick) > self._rules.clock.round_seconds
        self._last_tick = now
        current = self._rules.clock.round_at(now)
        if has_jumped:  # the machine slept, or its clock was set
            self._membership.stall.slept(current)
        return current if current != self.round else None

    def turn(
        self, current: int, contributes: bool, now: float, left_out: frozenset[SpanId] = frozenset()
    ) -> list[Action]:
        """Close the round in progress and begin `current`."""
        actions = self._close(self.round, now) if self.round is not None else []
        self._membership.stall.round_begun(self.round, current, now)
        self.round = current
        self._included_in_round = 0
        return actions + self._exchange.begin(current, contributes, left_out)

    def entry_absorbed(self, round_index: int, num_included: int) -> None:
        """Count an absorbed entry."""
        self._membership.entry_absorbed(round_index)
        if round_index == self.round:
            self._included_in_round += num_included

    def _close(self, closing: int, now: float) -> list[Action]:
        actions = self._exchange.close()
        collection = self._exchange.collection
        if collection is None:
            return actions
        fragment = collection.fragment
        heads = self._chains.fragment_heads(fragment, self._rules.num_spans[fragment]) or ()
        closed = RoundClosed(
            round=closing,
            num_spans=self._rules.num_spans[fragment],
            num_entries=sum(head.round == closing for head in heads),
            num_included=self._included_in_round,
            num_ready=self._membership.presence.num_ready(now),
            num_members=sum(member.trains for member in collection.roster.members),
        )
        return [*actions, closed]
