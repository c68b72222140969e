"""One peer of the swarm without a clock, a network or a vector: events in, actions out.

The asyncio shell in `node/` drives it. Times are swarm seconds and always passed as arguments.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2p_diloco.errors import PeerError, clean_text
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, ApplyEntry, KeepRoster, Report, Send, Stage, sends
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.membership.local import Conditions, LocalPeer
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.roster_book import Governance, RosterBook
from p2p_diloco.protocol.paths import Paths
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.readiness import ASKS_IN_A_ROUND
from p2p_diloco.protocol.repair.repair import Repair
from p2p_diloco.protocol.results import EntryChecked, EntryCompared, Result, SpanReduced
from p2p_diloco.protocol.round.chain import ChainBook, EntryFate
from p2p_diloco.protocol.round.credit import CreditBook
from p2p_diloco.protocol.round.exchange import Exchange, RoundDriver
from p2p_diloco.protocol.round.influence import Agreement, Influence
from p2p_diloco.protocol.round.round import FragmentContribution, newcomers_of
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS, Ballots, Prepare, Promised, Proposal, Vote
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import (
    Message,
    Opening,
    Refusal,
    RosterReply,
    RosterRequest,
    RowMean,
    SignedContent,
    SignedContentRequest,
    SpanVector,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, Verify
from p2p_diloco.span_log import SpanHead

CYCLES_IN_MEMORY = 1
"""Cycles of entries kept in memory, where late peers ask first. Older ones (up to `retained_cycles`) are on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """A peer with an entry that may become valid; the payload is requested once the entry may be absorbed."""

    sender: PeerId
    height: int
    round: int
    roster: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state that a restarted peer found on its disk.

    Attributes:
        rosters: certified rosters in the order in which they were stored. A former member that finds none has lost its
            disk, and does not vote until a roster lists its new incarnation.
    """

    rosters: tuple[CertifiedRoster, ...] = ()
    ballots: Ballots = NO_BALLOTS
    heads: Mapping[SpanId, SpanHead] | None = None
    activity: Activity | None = None


class PeerEngine:
    """All rules of one peer. A state machine without I/O, whose verbs return the actions to perform, in their order.

    Times are swarm seconds, and always passed.

    - First `hold_state` if this peer has its spans, and after it `found` if it founds the run.
    - `set_conditions` before a `tick`, whenever something changes that only the shell can know.
    - `tick` at the time that `wake_at` has returned, and soon after any other verb: rounds, ballots, heartbeats and
      requests are due by time. After each `tick`, call `wake_at` again.
    - `link_up` and `link_lost` as the transport reports them, and `receive` for each message but entries.
    - `take_result` for the outcome of each `RequestContribution`, `ReduceSpan`, `CompareContent`, `RebuildSpan`,
      `RebuildParent` and `HashSpan`, for each entry that the codec has checked, and for each damaged span. If one does
      not come, the rules request it again or do without.
    - `leave` once; then go on with all of these until `may_go`.
    """

    def __init__(self, *, me: LocalPeer, rules: RunRules, verify: Verify, recalled: SavedState | None = None) -> None:
        recalled = recalled if recalled is not None else SavedState()
        self.rules = rules
        self.me = me
        """This peer as it was started; `membership.local.me` may have a later incarnation."""
        self.linked: set[PeerId] = set()
        self.book = RosterBook(rules=rules, verify=verify)
        self.last_included: int | None = None
        """Latest round with an entry that includes this peer's contribution."""
        self.last_refusal: tuple[int, str] | None = None
        """The round of the contribution that was last refused, and the reason."""
        self.membership = Membership(
            me=me,
            rules=rules,
            book=self.book,
            ballots=recalled.ballots,
            verify=verify,
            remembers=bool(recalled.rosters),
            linked=self.linked,
        )
        in_memory = min(rules.retained_cycles, CYCLES_IN_MEMORY)
        self.chains = ChainBook(rules=rules, retained_cycles=in_memory, verify=verify)
        self.exchange = Exchange(rules=rules, membership=self.membership, chains=self.chains)
        self._heartbeats = HeartbeatBuilder(rules=rules, membership=self.membership, chains=self.chains)
        self._round_driver = RoundDriver(
            rules=rules, membership=self.membership, chains=self.chains, exchange=self.exchange
        )
        self.repair = Repair(
            rules=rules,
            membership=self.membership,
            chains=self.chains,
            heartbeats=self._heartbeats,
            linked=self.linked,
            verify=verify,
        )
        self._paths = Paths(rules=rules, membership=self.membership)
        self.influence = Influence(me.peer)
        self.credit = CreditBook(rules)
        self._to_greet: set[PeerId] = set()
        self._ticked_at = -math.inf
        self.noted: dict[SpanId, _Noted] = {}
        self._recall(recalled)

    def _recall(self, recalled: SavedState) -> None:
        history = self.membership.rosters.history
        for certified in recalled.rosters:
            with contextlib.suppress(PeerError):  # a branch that has no room; members send what is needed
                self.book.add(certified, wins=history.is_better(certified, certified.roster.cycle))
        if recalled.activity is not None:
            history.recall(recalled.activity)
        if recalled.heads is not None:
            self.hold_state(recalled.heads)

    # -- state

    def hold_state(self, heads: Mapping[SpanId, SpanHead]) -> None:
        """Start from spans that this peer holds, from the founding or from its checkpoint."""
        for span, head in heads.items():
            self.chains.set_head(span, head)
        self.repair.serving.hold_state()

    def holds_needlessly(self, now: float) -> bool:
        """Return whether a peer that does not train may drop its state: it is not a member, and others can serve it."""
        return self.repair.is_needless(now)

    def drop_state(self) -> None:
        """Drop all vectors. Check `holds_needlessly` first."""
        self.repair.drop()
        for span in self.rules.span_elements:
            self.chains.drop_head(span)

    def found(self, founding: CertifiedRoster, now: float) -> list[Action]:
        """Found the run. This peer holds the initial state and is ready at once."""
        self.membership.local.set_ready(True)
        return self.membership.rosters.take((founding,), now)

    @property
    def conditions(self) -> Conditions:
        """Return the conditions under which this peer takes part."""
        return self.membership.local.conditions

    def set_conditions(self, conditions: Conditions) -> None:
        """Take the present conditions: what the shell knows about this peer and the rules do not."""
        self.membership.local.set_conditions(conditions)

    @property
    def serves_state(self) -> bool:
        """Return whether this peer holds vectors that others may fetch."""
        return self.repair.serving.has_state

    @property
    def catch_up(self) -> CatchUp:
        """The transfers of this peer."""
        return self.repair.catch_up

    @property
    def ready(self) -> bool:
        """Return whether this peer holds the agreed state and may be a member."""
        return self.membership.local.ready

    @property
    def round(self) -> int | None:
        """The round in progress at this peer."""
        return self._round_driver.round

    def sign_content(self, question: SignedContentRequest, digests: tuple[tuple[Digest, Digest], ...]) -> SignedContent:
        """Return the signed answer to a request that another peer forwarded."""
        return self.repair.serving.sign_content(question, digests)

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        """Return the log positions of all fragments at their closed boundaries; empty while a span is missing."""
        return self.repair.closed_heads(now)

    # -- time

    def latest_round(self) -> int:
        """Return the latest round that this peer has certainly reached, by the tips that it holds and its promises."""
        heads = self.chains.heads.values()
        return max((self.membership.votes.promised_round(), *(head.round for head in heads)))

    def wake_at(self, now: float) -> float:
        """Return the time by which `tick` must be called."""
        if self._heartbeats.next_at <= now or self._to_greet:
            return now
        clock = self.rules.clock
        times = [self._heartbeats.next_at, *clock.moments(now)]
        if self.repair.follows and not self.ready and self.catch_up.is_complete():
            # It polls the others: what they send unasked may come too late.
            times.append(now + clock.round_seconds / ASKS_IN_A_ROUND)
        return min(time for time in times if time > now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due: heartbeats, rounds, rosters, and requests that got no answer."""
        actions: list[Action] = []
        if now < self._ticked_at - self.rules.silence_seconds:
            self.membership.set_back(now)
            self.repair.set_back(now)
        self._ticked_at = now
        is_time_uncertain = self.conditions.is_time_uncertain
        begun = None if is_time_uncertain and self.round is None else self._round_driver.tick(now)
        if begun is not None:
            if self.rules.clock.fragment(begun) == 0:
                actions += self._judge_influence(self.rules.clock.cycle(begun), now)
            height = sum(head.height for head in self.chains.heads.values())
            actions += self.membership.presence.round_over(begun - 1, height)
            actions += self.membership.rosters.keep_activity()
            due = self.chains.absorb_due(self.book, begun + 1)
            actions += self._absorbed(due, now) if due else self._ask_noted(now)
            waits, reports = self.repair.serving.followers.wait_for(now)
            left_out = self.catch_up.differences.left_out()
            is_level = self.ready and left_out is not None and not left_out
            self.credit.look(self.book, self.chains.heads, self.rules.clock.cycle(begun), is_level=is_level)
            contributes = self.serves_state and left_out is not None and not waits and not is_time_uncertain
            self._heartbeats.freeze(begun)
            actions += self.repair.begin_round(begun)
            actions += reports + self._round_driver.turn(begun, contributes, now, left_out or frozenset())
            if waits:
                self.membership.stall.waited()
        actions += self.exchange.tick(now)
        actions += self.membership.tick(now) if not is_time_uncertain else []
        actions += self.repair.pump(now)
        if self._heartbeats.is_due(now):
            actions += self.membership.liveness.report_split(now)
            actions += self._sign_of_life(self.linked, now)
        elif self._to_greet:
            actions += self._sign_of_life(self._to_greet, now)
        return actions

    def wanted_links(self, announced: Collection[PeerId] = ()) -> frozenset[PeerId] | None:
        """Return the peers, including `announced` ones, that this peer needs a link to; None: all that it can reach."""
        return self._paths.wanted_links(self.round, announced)

    def _sign_of_life(self, to: Iterable[PeerId], now: float) -> list[Action]:
        to, self._to_greet = sorted(to), set()
        is_nearly_level = self.repair.follows and self.catch_up.differences.is_nearly_level()
        heartbeat = self._heartbeats.heartbeat(self.closed_heads(now), is_nearly_level=is_nearly_level)
        deadline = now + self.rules.silence_seconds
        declaration = self.membership.declarations.own_news(now)
        messages: list[Message] = [heartbeat] if declaration is None else [heartbeat, declaration]
        return [Send(to=peer, message=message, deadline=deadline) for peer in to for message in messages]

    # -- messages

    def _take_heartbeat(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        if sender != beat.peer or not self.membership.liveness.take(beat, now):
            return []
        actions: list[Action] = []
        if beat.roster != ZERO_DIGEST and beat.roster not in self.book:
            actions.append(self.membership.request_rosters(sender, now))
        return actions + self.repair.compare(sender, beat, now)

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Action]:
        """Receive a message from an authenticated peer. Entries come as `EntryChecked` instead."""
        match message:
            case Heartbeat():
                return self._take_heartbeat(sender, message, now)
            case Opening() | SpanVector() | RowMean():
                return self.exchange.take(sender, message, now)
            case Declaration() | Prepare() | Promised() | Proposal() | Vote():
                return self.membership.receive(sender, message, now)
            case RosterRequest():
                reply = RosterReply(rosters=self.book.after(message.known))
                return [Send(to=sender, message=reply, deadline=self.rules.clock.soon(now))] if reply.rosters else []
            case RosterReply():
                return self._take_rosters(sender, message, now)
            case Refusal():
                return self._take_refusal(sender, message, now)
            case _:
                return self.repair.take(sender, message, now)

    def take_result(self, result: Result, now: float) -> list[Action]:
        """Take the result of work that an earlier action requested, or of a check that the shell made by itself."""
        match result:
            case EntryChecked():
                return self._take_entry(result.sender, result.entry, result.payload_norm, now)
            case EntryCompared():
                self._note_agreement(result.entry, result.agreement)
                return []
            case FragmentContribution():
                return self.exchange.contribute(result, now)
            case SpanReduced():
                return self._take_mean(result, now)
            case _:
                return self.repair.take_result(result, now)

    def _take_rosters(self, sender: PeerId, reply: RosterReply, now: float) -> list[Action]:
        before = self.book.grid()
        actions = self.membership.rosters.take(reply.rosters, now)
        actions += self._paths.hand_on_rosters(before, sender, actions, now, self.rules.clock.soon(now))
        if any(isinstance(action, Report) and action.topic == "branch" for action in actions):
            self.repair.adopt_branch()
        view = self.membership.liveness.views.get(sender)
        learnt = any(isinstance(action, KeepRoster) for action in actions)
        if learnt and view is not None and view.heartbeat.roster not in self.book:
            actions.append(self.membership.request_rosters(sender, now))
        lacking = next(filter(self.book.lacks_earlier_certificate, reply.rosters), None)
        if lacking is not None:
            actions.append(self.membership.request_certificate(sender, lacking.roster.parent, now))
        return actions + self._ask_noted(now)

    def _take_refusal(self, sender: PeerId, refusal: Refusal, now: float) -> list[Action]:
        reason = clean_text(refusal.reason.decode("utf-8", "replace"))
        self.last_refusal = refusal.round, reason
        text = f"contribution to round {refusal.round} left out: {reason}"
        actions: list[Action] = [Report(topic="refused", text=text)]
        if refusal.newer_roster:
            actions.append(self.membership.request_rosters(sender, now))
        return actions

    # -- entries

    def _take_entry(self, sender: PeerId, entry: Entry, payload_norm: float, now: float) -> list[Action]:
        self.catch_up.fetcher.received(sender, now)
        is_asked = self.catch_up.fetcher.is_asked_of(entry.span, sender)
        is_late = not is_asked and self.exchange.has_named(entry.span, entry.parent, before=entry.round)
        latest = self.rules.clock.round_at(now) + 1
        verdict = self.chains.offer(entry, payload_norm, self.book, latest, is_late=is_late)
        reports: list[Action] = []
        if verdict.evidence is not None:
            reports.append(Report(topic="equivocation", text=verdict.evidence.sentence()))
        if verdict.fate is EntryFate.ABSORBED:
            return reports + self._absorbed(verdict.absorbed, now)
        if verdict.fate is EntryFate.OTHER_CHILD:
            reports += self.catch_up.differences.step_back(entry.span)
            return reports + self._take_entry(sender, entry, payload_norm, now)
        if verdict.fate is EntryFate.REFUSED:
            reports.append(Report(topic="entry-refused", text=f"{short_peer_id(sender)}: {verdict.reason}"))
            # The peer that was asked has no entry that follows our tip; comparing digests finds the peers that differ.
            tip = self.chains.heads[entry.span].digest
            reports += self.catch_up.differences.entry_absent(sender, entry.span, tip, now)
            return reports + self.repair.pump(now)
        if verdict.fate is EntryFate.KNOWN or not self.repair.follows:
            return reports
        if verdict.fate is EntryFate.LACKS_ROSTER and is_asked and self.repair.is_past_branch(sender, entry):
            reports += self.catch_up.differences.entry_absent(sender, entry.span, entry.parent, now)
            return reports + self.repair.pump(now)
        return reports + self._wait_for(verdict.fate, sender, entry, is_kept=verdict.is_kept, now=now)

    def _wait_for(self, fate: EntryFate, sender: PeerId, entry: Entry, *, is_kept: bool, now: float) -> list[Action]:
        """Request what an entry needs before it can be absorbed; note its sender if the entry is not kept here.

        An entry from a stranger never makes this peer wait for the parent. It may be a true entry that this peer has
        lost, sent again and again by a peer that withholds the entries that lead to it.
        """
        if not is_kept or fate is EntryFate.EARLY:
            self._note(sender, entry, now)
        if fate is EntryFate.LACKS_ROSTER:
            return [self.membership.request_rosters(sender, now)]
        if fate is EntryFate.LACKS_CERTIFICATE:
            return [self.membership.request_certificate(sender, entry.roster, now)]
        if fate is EntryFate.EARLY or (sender != self.me.peer and self.is_stranger(sender)):
            return []
        if sender != self.me.peer:
            self.repair.readiness.not_alone(now)
        self.catch_up.fetcher.want_entry(entry.span, sender if sender != self.me.peer else None)
        return self.repair.pump(now)

    def _note(self, sender: PeerId, entry: Entry, now: float) -> None:
        """Note the sender of an entry, one per span.

        A note of a non-member does not replace a member's, and a note of a round that is still too early does not
        replace one that is not. A note only names a peer to ask, and only members are asked, so a flood costs nothing.
        """
        old, latest = self.noted.get(entry.span), self.rules.clock.round_at(now) + 1
        if old is not None:
            if self.book.lists(old.sender) and not self.book.lists(sender):
                return
            if entry.round > latest >= old.round:
                return
        self.noted[entry.span] = _Noted(sender=sender, height=entry.height, round=entry.round, roster=entry.roster)

    def _ask_noted(self, now: float) -> list[Action]:
        """Fetch the entries after our tips from members noted with an entry that may be valid now."""
        latest, is_wanted = self.rules.clock.round_at(now) + 1, False
        for span, noted in list(self.noted.items()):
            head = self.chains.heads.get(span)
            if head is None or noted.height <= head.height:
                del self.noted[span]
            elif (
                noted.round <= latest
                and self.book.lists(noted.sender)
                and self.book.governance(noted.roster, noted.round) is Governance.GOVERNS
            ):
                del self.noted[span]
                self.catch_up.fetcher.want_entry(span, noted.sender)
                is_wanted = True
        return self.repair.pump(now) if is_wanted else []

    def is_stranger(self, peer: PeerId) -> bool:
        """Return whether a peer is neither a member nor the founder; False until a roster is known here."""
        return self.book.in_force is not None and not self.book.lists(peer) and peer != self.book.founder

    def is_unknown(self, peer: PeerId) -> bool:
        """Return whether a peer is a stranger and was not a member recently.

        Recent members are not unknown, so that the two sides of a split can find each other again.
        """
        return self.is_stranger(peer) and not self.book.has_listed(peer)

    def _absorbed(self, entries: Iterable[Entry], now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in entries:
            actions += self._paths.hand_down(entry, now)
            peers = self.book.included_in(entry)
            roster, grid = self.book.folded(entry.roster, entry.round)
            self._note_weights(entry, grid.owner(entry.span), roster)
            self.credit.entry_absorbed(entry, roster)
            self.membership.presence.owners.entry_absorbed(entry.round, entry.span, roster, grid)
            # The owner was present too, although after a restart it contributes nothing until a roster lists its new
            # incarnation.
            present = self.book.present_at(entry) | {grid.owner(entry.span)}
            self.membership.presence.note_entry(present, peers, entry.round)
            self._round_driver.entry_absorbed(entry.round, len(peers))
            self.catch_up.differences.entry_absorbed(entry.span, now)
            own_included = self.me.peer in peers
            if own_included and (self.last_included is None or entry.round > self.last_included):
                self.last_included = entry.round
            sent = self.exchange.take_sent(entry)
            actions.append(ApplyEntry(entry=entry, own_included=own_included, own=sent if own_included else None))
        return actions + self._ask_noted(now) + self.repair.pump(now)

    def _take_mean(self, reduced: SpanReduced, now: float) -> list[Action]:
        """Send a row's mean to the span's owner; absorb an entry and distribute it.

        A row without a mean, because no part was sound, is sent too: the owner learns who was present.
        """
        order = reduced.order
        if order.stage is not Stage.FINISH:
            for part in order.parts:
                is_left_out = part.peer in reduced.against
                self.influence.contributed(part.peer, part.norm, order.norm_limit, is_left_out=is_left_out)
        result = self.exchange.span_reduced(order, reduced.sound, reduced.payload, reduced.measured)
        if isinstance(result, str):
            return [Report(topic="skipped", text=f"skipped {order.span} in round {order.round}: {result}")]
        if isinstance(result, RowMean):
            return self.exchange.hand_up(result, now)
        # The entry is distributed only once it is absorbed: one that is invalid for this peer is invalid for all.
        return self._take_entry(self.me.peer, result, reduced.payload_norm, now)

    def _note_agreement(self, entry: Entry, agreement: Agreement) -> None:
        """Note how an entry agrees with this peer's contribution to it.

        In a grid of several rows an entry follows from the means of rows: whoever averaged one may have falsified it.
        """
        grid = self._grid_of(entry)
        if grid is not None and len(grid.rows) == 1:
            self.influence.agreed(grid.owner(entry.span), agreement)

    def _grid_of(self, entry: Entry) -> Grid | None:
        """Return the grid of an entry of this cycle or the last; None for an older one."""
        clock, governing = self.rules.clock, self.book.governing(entry.round)
        is_late = self.round is None or clock.cycle(entry.round) < clock.cycle(self.round) - 1
        return None if is_late or governing is None or governing[0].digest() != entry.roster else governing[1]

    def _note_weights(self, entry: Entry, owner: PeerId, roster: Roster) -> None:
        """Note the weights of an entry of this cycle or the last."""
        clock = self.rules.clock
        if self._grid_of(entry) is not None:
            first_cycle = clock.cycle(self.book.last_before(entry.roster) + 1)
            newcomers = newcomers_of(roster, self.book.parent_of(roster), clock.cycle(entry.round), first_cycle)
            self.influence.entry_absorbed(entry, owner, roster, newcomers)

    def _judge_influence(self, cycle: int, now: float) -> list[Action]:
        roster = self.book.in_force
        rates = {peer: beat.tokens_per_second for peer, beat in self.membership.liveness.alive(now).items()}
        rates[self.me.peer] = self.conditions.progress.tokens_per_second
        return [*self.influence.cycle_over(cycle, roster.peers() if roster is not None else (), rates)]

    # -- links and leaving

    def link_up(self, peer: PeerId) -> None:
        """Called when `peer` can be reached: it gets a heartbeat at the next tick."""
        self.linked.add(peer)
        self._to_greet.add(peer)

    def link_lost(self, peer: PeerId) -> None:
        """Called when the link to `peer` is lost."""
        self.linked.discard(peer)
        self._to_greet.discard(peer)
        self.catch_up.fetcher.lose(peer)

    def leave(self, now: float) -> list[Action]:
        """Announce that this peer leaves; it stays for as long as the others need its vote (`may_go`).

        A lone peer leaves without an announcement: no other peer needs to know, and it may come back.
        """
        roster = self.book.in_force
        others = roster.peers() - {self.me.peer} if roster is not None else frozenset()
        if not others or not self.linked:
            self.membership.local.leave(None)
            return []
        declaration = self.membership.leave(now)
        return [*sends(self.linked, declaration, self.rules.clock.soon(now))]

    def may_go(self, now: float) -> bool:
        """Return whether a leaving peer is no longer needed."""
        return not self.linked or self.membership.may_go(now)
