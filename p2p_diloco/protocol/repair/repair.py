"""Repair: find out what this peer lacks, fetch it, become ready, and answer requests of others.

`Sources` decides which peers can be asked, `CatchUp` what is missing, `Readiness` when a peer holds the agreed state.
`Serving` answers. This module passes messages, time and the shell's results to them.

The whole run follows one branch of rosters. If another one wins, spans that differ are fetched from its members, even
if our own log is longer.
"""

from __future__ import annotations

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.actions import Action, RebuildSpan
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.fetcher import CatchUpRules
from p2p_diloco.protocol.repair.readiness import Readiness
from p2p_diloco.protocol.repair.serving import Serving
from p2p_diloco.protocol.repair.signed_content import IndirectVoters
from p2p_diloco.protocol.repair.sources import Sources
from p2p_diloco.protocol.results import (
    ContentCompared,
    ParentRebuilt,
    RepairResult,
    SpanDamaged,
    SpanHashed,
    SpanRebuilt,
)
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    EntryAbsent,
    HeadsReply,
    Message,
    SignedContent,
    SpanReply,
)
from p2p_diloco.protocol.wire.roster import Verify

BYTES_PER_ELEMENT_OF_STATE = 8
PATIENT_CYCLES = 2
SHORTEST_ENTRY_SECONDS = 1.5
"""Shortest time after which an entry is requested again; on lines with 200 ms each way, answers take half a second."""


class Repair:
    """One peer's repairs. A state machine without I/O.

    Call `begin_round` when a round begins, and `pump` after everything that may change what can be asked.

    Args:
        linked: peers to which messages can be sent now; shared with the engine, which updates it.
    """

    def __init__(
        self,
        *,
        rules: RunRules,
        membership: Membership,
        chains: ChainBook,
        heartbeats: HeartbeatBuilder,
        linked: set[PeerId],
        verify: Verify,
    ) -> None:
        self.rules = rules
        self.membership = membership
        self.chains = chains
        self.linked = linked
        self._heartbeats = heartbeats
        self._verify = verify
        self.catch_up = self._new_catch_up()
        self.sources = Sources(rules=rules, membership=membership, linked=linked)
        self.readiness = Readiness(rules=rules, membership=membership, sources=self.sources)
        self.serving = Serving(rules=rules, membership=membership, chains=chains, sources=self.sources, linked=linked)
        self._scrub_number: int | None = None

    def _new_catch_up(self, before: CatchUp | None = None) -> CatchUp:
        me, rules = self.membership.local.me, _catch_up_rules(self.rules)
        indirect = IndirectVoters(
            me=me.peer,
            draw_nonce=lambda now: int.from_bytes(me.sign(b"nonce" + repr(now).encode())[:7], "little"),
            rules=rules,
        )
        damaged = before.scrub.damaged if before is not None else None
        catch_up = CatchUp(me=me.peer, rules=rules, chains=self.chains, indirect=indirect, damaged=damaged)
        if before is not None and before.differences.is_adopting:
            catch_up.adopt()
        return catch_up

    # -- what others learn

    @property
    def follows(self) -> bool:
        """Return whether this peer follows the logs: it trains or archives, or is or should be on the roster."""
        roster, me = self.membership.book.in_force, self.membership.local.me
        is_listed = roster is not None and roster.member(me.peer) is not None
        return me.trains or me.archives or is_listed or self.membership.declarations.is_needed()

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        """Return the tips that heartbeats publish; none while spans are missing or an abandoned branch is replaced."""
        if not self.serving.has_state or self.catch_up.differences.is_adopting:
            return ()
        return self._heartbeats.closed_heads(now)

    def is_needless(self, now: float) -> bool:
        """Return whether others can serve the state that this peer holds without training. Call about once a second."""
        return self.serving.is_needless(now, follows=self.follows)

    def drop(self) -> None:
        """Stop holding and fetching vectors."""
        self.serving.drop_state()
        self.membership.local.set_ready(False)
        self.catch_up.differences.forget()

    # -- time

    def begin_round(self, round_index: int) -> list[Action]:
        """Begin a new scrub every `scrub_cycles` cycles, on all peers in the same round, because memory can fail.

        Returns:
            Requests to rebuild damaged spans that could not be replaced so far.
        """
        number = self.rules.clock.cycle(round_index) // self.rules.scrub_cycles
        if number != self._scrub_number:
            self._scrub_number = number
            self.catch_up.scrub.begin_again()
        return self.catch_up.verifier.retry_damaged()

    def pump(self, now: float) -> list[Action]:
        """Request what is missing. Become ready once nothing is missing and others hold the same bytes."""
        membership, catch_up, readiness = self.membership, self.catch_up, self.readiness
        readiness.awake(now)
        if not self.follows or membership.book.in_force is None:
            return []
        if membership.local.ready and catch_up.is_complete() and not catch_up.differences.is_parted:
            self.serving.hold_state()
            readiness.not_alone(now)
            return []  # the common case, at every tick and after every message
        donors = self.sources.donors(now)
        if donors or readiness.alone_since is None:
            readiness.not_alone(now)
        if readiness.is_left_alone(now):
            catch_up.differences.stop_waiting()
        catch_up.fetcher.want_everything()
        self.sources.look(catch_up, now)
        membership.rosters.note_signed_rosters(catch_up.indirect.rosters)
        actions = readiness.begin_anew(catch_up, now)
        if membership.rosters.doubts and not membership.local.ready:
            actions += catch_up.verifier.ask_indirect([0], now)
        holders = list(self.sources.holders(now))
        able = [*(donors or holders), *self.sources.strangers(now)]
        actions += catch_up.pump(able, now, self.sources.for_spans(now), holders)
        actions += readiness.report_waiting(catch_up, now)
        if not membership.local.ready:
            actions += self._compare_kept()
        if catch_up.is_complete():
            self.serving.hold_state()
            if not membership.local.ready and not membership.local.leaving:
                actions += readiness.become_ready(catch_up, donors, now)
        elif not membership.local.ready and catch_up.differences.lacks_entries_only():
            late = [donor for donor in donors if not catch_up.scrub.is_ahead(donor, now)]
            actions += readiness.ask_witnesses(catch_up, late, now) if late else []
        return actions

    def _compare_kept(self) -> list[Action]:
        """Return the comparisons with answers whose tips this peer has reached since they came."""
        actions: list[Action] = []
        for fragment, num_spans in enumerate(self.rules.num_spans):
            heads = self.chains.fragment_heads(fragment, num_spans)
            if heads is not None:
                actions += self.catch_up.scrub.due(fragment, [head.digest for head in heads])
        return actions

    def set_back(self, now: float) -> None:
        """Restart all requests: the clock was far ahead, so the times of earlier ones lie in the future."""
        self.sources.set_back()
        self.serving.set_back()
        self.readiness.set_back(now)
        self.catch_up.indirect.forget()
        if not self.membership.local.ready:
            self.catch_up = self._new_catch_up(self.catch_up)

    def adopt_branch(self) -> None:
        """Switch to another branch of rosters: fetch what differs, and do not count as ready until then.

        A fragment may have matched the others when this round began, and have absorbed an entry of the old branch
        since. So its current tips are compared, not those at the beginning of the round.
        """
        self.membership.local.set_ready(False)
        self._heartbeats.thaw()
        self.catch_up.adopt()

    def is_past_branch(self, sender: PeerId, entry: Entry) -> bool:
        """Return whether the unknown roster of an entry belongs to an abandoned branch, so that it will never arrive.

        A peer that follows our own roster may hold entries of a branch that was abandoned since, if its log continued
        where no other peer had one. It cannot prove that they are valid, but it can serve the whole span.
        """
        view = self.membership.liveness.views.get(sender)
        return view is not None and view.heartbeat.roster == self.membership.book.in_force_digest

    # -- messages

    def compare(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        """Compare a peer's fragments with ours, and send requests where they differ."""
        actions: list[Action] = []
        if not self.follows or not self.membership.book.is_on_chain(beat.roster):
            return actions
        catch_up, sources = self.catch_up, self.sources
        for fragment, theirs in enumerate(beat.heads[: len(self.rules.num_spans)]):
            mine = self._heartbeats.boundary_digest(fragment)
            if mine is None or self.rules.clock.closed_round(fragment, now) != theirs.round:
                continue
            if mine != theirs.digest:
                sources.look(catch_up, now)
                askable = {*catch_up.quorums.tips.askable, *sources.strangers(now)}
                if sources.is_donor(sender, beat, now) or sender in askable:
                    actions += catch_up.differences.ask_tips(fragment, sender, now)
                continue
            catch_up.differences.note_equal(fragment, sender)
            if sources.may_serve(sender):
                catch_up.differences.adopted(fragment)
                # A peer becomes ready by the answers of donors only, not of any peer with the same tips.
                if self.serving.has_state and (self.membership.local.ready or sources.is_donor(sender, beat, now)):
                    actions += catch_up.verifier.ask_content(fragment, sender, now)
        return actions

    def take(self, sender: PeerId, message: Message, now: float) -> list[Action]:
        """Answer a question or take an answer. Any other message is dropped."""
        catch_up = self.catch_up
        match message:
            case HeadsReply():
                return self._take_tips(sender, message, now) if catch_up.differences.take_tips(sender, message) else []
            case EntryAbsent():
                catch_up.fetcher.received(sender, now)
                absent = catch_up.differences.entry_absent(sender, message.span, message.parent, now)
                return absent + self.pump(now)
            case SpanReply() if message.span in self.rules.span_elements:
                catch_up.fetcher.received(sender, now)
                return catch_up.fetcher.take_piece(sender, message, now) + self.pump(now)
            case ContentReply():
                self.sources.look(catch_up, now)
                settled = catch_up.verifier.take_content(sender, message, now)
                actions = [*settled, *self.pump(now)] if settled else []
                holds = self.serving.holds(message.fragment)
                return actions + (self._take_content(sender, message, now) if holds else [])
            case SignedContent():
                return self._take_signed(sender, message, now)
            case _:
                return self.serving.answer(sender, message, now, is_adopting=catch_up.differences.is_adopting)

    def _take_tips(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        self.sources.look(self.catch_up, now)
        actions = self.catch_up.differences.compare_tips(sender, reply, now) + self.pump(now)
        heads = self.chains.fragment_heads(reply.fragment, self.rules.num_spans[reply.fragment])
        is_level = heads is not None and [one.digest for one in heads] == [one.digest for one in reply.heads]
        if self.serving.has_state and is_level:
            # Boundaries are as old as the round. A peer that has caught up since would wait for the next one. With a
            # single fragment, whose boundary moves with every entry, it would wait for ever.
            actions += self.catch_up.verifier.ask_content(reply.fragment, sender, now)
        return actions

    def _take_content(self, sender: PeerId, reply: ContentReply, now: float) -> list[Action]:
        """Have contents compared. If the donor has moved on, also request its tips.

        Heartbeats are compared only if both clocks show the same closed boundary. If a donor sends one per round, just
        before the round ends, a peer whose clock is slightly ahead can use none that is younger than a cycle, and with
        a single fragment none at all. It would request digests of states that the donor has left, for ever.
        """
        question = self.catch_up.scrub.take(sender, reply)
        if question is None:
            return []
        if self.membership.local.ready or not self._has_gone_on(reply):
            return [question]
        self.catch_up.scrub.keep(question, now)
        if sender not in self.sources.donors(now):
            return [question]
        return [question, *self.catch_up.differences.ask_tips(reply.fragment, sender, now)]

    def _has_gone_on(self, reply: ContentReply | SignedContent) -> bool:
        """Return whether a peer has a tip that ours has never been at. A peer at an earlier tip has nothing for us."""
        for index, (digest, _) in enumerate(reply.digests[: self.rules.num_spans[reply.fragment]]):
            span = SpanId(reply.fragment, index)
            if digest != self.chains.heads[span].digest and self.chains.entry_after(span, digest) is None:
                return True
        return False

    def _take_signed(self, sender: PeerId, answer: SignedContent, now: float) -> list[Action]:
        catch_up = self.catch_up
        if answer.requester != self.membership.local.peer:
            return self.serving.bring_back(sender, answer, now)
        if not catch_up.indirect.expects(answer):
            return []
        if not self._verify(answer.voter, answer.statement(self.rules.run), answer.signature):
            return []  # the voter or a relay is at fault; which one is unknown
        if not self.membership.book.is_on_chain(answer.roster):
            catch_up.indirect.note_roster(answer, now)
            return []  # the voter follows rosters that are not in force here, so its digests do not count
        catch_up.verifier.take_signed(answer, now)
        self.sources.look(catch_up, now)
        actions = catch_up.verifier.settle_fragment(answer.fragment, now)
        is_ready = self.membership.local.ready
        is_compared = not is_ready or catch_up.scrub.is_contested(answer.fragment)
        if answer.digests and is_compared and self.serving.holds(answer.fragment):
            question = catch_up.scrub.compare_signed(answer, sender)
            actions.append(question)
            if not is_ready and self._has_gone_on(answer):
                catch_up.scrub.keep(question, now)
        return actions + self.pump(now)

    # -- results of the shell

    def take_result(self, result: RepairResult, now: float) -> list[Action]:
        """Take the result of work that an action of the repair requested, or note a damaged span."""
        verifier = self.catch_up.verifier
        if isinstance(result, SpanDamaged):
            return verifier.damage(result.span, result.reason)
        self.sources.look(self.catch_up, now)
        match result:
            case ContentCompared():
                actions = verifier.compared(result, now)
            case SpanHashed():
                actions = verifier.hashed(result, now)
            case ParentRebuilt():
                actions = self.catch_up.differences.parent_rebuilt(result)
            case SpanRebuilt():
                actions = verifier.rebuilt(result, self.sources.donors(now), now)
                if not actions or isinstance(actions[0], RebuildSpan):
                    return actions  # it waits for the disk
        return actions + self.pump(now)


def _catch_up_rules(rules: RunRules) -> CatchUpRules:
    return CatchUpRules(
        num_spans=rules.num_spans,
        span_bytes={span: BYTES_PER_ELEMENT_OF_STATE * n for span, n in rules.span_elements.items()},
        answer_seconds=rules.silence_seconds,
        entry_seconds=max(rules.clock.round_seconds / 4.0, SHORTEST_ENTRY_SECONDS),
        piece_seconds=rules.piece_seconds,
        piece_target_seconds=min(rules.clock.round_seconds, rules.piece_seconds / 2.0),
        pause_seconds=rules.clock.round_seconds,
        patience_seconds=PATIENT_CYCLES * rules.clock.num_fragments * rules.clock.round_seconds,
    )
