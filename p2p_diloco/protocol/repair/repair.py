"""Repair: find out what this peer lacks, fetch it, become ready, and answer requests of others.

`CatchUp` tracks what is missing. This module decides who can be asked and when a peer holds the agreed state. It also
handles a change of branch: the whole run follows one branch of rosters, so if another one wins, spans that differ are
fetched from its members, even if our own log is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.log import SpanHead
from p2p_diloco.protocol.actions import Action, RebuildSpan, Report, Send, ServeContent, ServeEntry, ServeSpan
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.majority import namers_for, voices_for
from p2p_diloco.protocol.repair.scrub import WITNESSES
from p2p_diloco.protocol.repair.signed_content import Carrier, FarVoters
from p2p_diloco.protocol.repair.transfer import CatchUpRules
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.inclusion import NO_SIGNATURE
from p2p_diloco.protocol.wire.member import FULL_SHARE
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Message,
    SignedContent,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.protocol.wire.roster import Verify
from p2p_diloco.rate import counted

BYTES_PER_ELEMENT_OF_STATE = 8
ASKS_IN_A_ROUND = 8
PATIENT_CYCLES = 2
SHORTEST_ENTRY_SECONDS = 1.5
"""Shortest time after which an entry is requested again; on lines with 200 ms each way, answers take half a second."""
REPORT_AGAIN_SILENCES = 16
ENOUGH_READY = 3
"""Number of ready peers with thin lines that together replace a founder in serving newcomers."""
QUIET_SILENCES = 2.0
"""Multiple of `silence_seconds` after which a peer that has requested nothing is no longer fetching."""
TIMES_RETAINED = 4
"""Longest total time that a lone member waits for peers that fetch from it, as a multiple of `retained_cycles`."""


class Followers:
    """Tracks the peers that fetch the state here. A state machine without I/O.

    A founder keeps the state for them, and a lone member waits for them. A thin line cannot send both a state and the
    entries of every round after it. If a lone member continued to make entries, no peer could ever catch up with it.
    Only entries wait; its island continues to train.
    """

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self.rules = rules
        self.membership = membership
        self._asked_at: dict[PeerId, float] = {}
        self._rounds_left = self._most_rounds()

    def asked(self, peer: PeerId, now: float) -> None:
        """Note that a peer has requested a span or an entry."""
        self._asked_at[peer] = now

    def are_fetching(self, now: float) -> bool:
        """Return whether a peer that trains and is not ready yet has recently requested something."""
        since = now - QUIET_SILENCES * self.rules.silence_seconds
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if at > since}
        alive = self.membership.alive(now)
        return any(peer in alive and alive[peer].trains and not alive[peer].ready for peer in self._asked_at)

    def wait_for(self, now: float) -> tuple[bool, list[Action]]:
        """Return whether this peer makes no entries in the round that begins. The first such round is reported.

        It waits only if it is the only member, so that no other member waits for an entry. The time is limited, because
        some strangers may never stop fetching.
        """
        fetching = self.are_fetching(now)
        roster, me = self.membership.book.in_force, self.membership.me
        if roster is None or roster.peers() != {me.peer} or not me.trains:
            self._rounds_left = self._most_rounds()
            return False, []
        if self._rounds_left <= 0 or not fetching:
            return False, []
        is_first = self._rounds_left == self._most_rounds()
        self._rounds_left -= 1
        text = "alone, with others catching up: training continues, entries wait for them"
        return True, [Report(topic="waiting", text=text)] if is_first else []

    def _most_rounds(self) -> int:
        return TIMES_RETAINED * self.rules.retained_cycles * self.rules.clock.num_fragments


class Repair:
    """One peer's repairs. A state machine without I/O.

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
        self._verify = verify
        self._carrier = Carrier(seconds=rules.silence_seconds)
        self.catch_up = self._new_catch_up(rules, membership, chains)
        self.serves_state = False
        self.rules = rules
        self.membership = membership
        self.chains = chains
        self._heartbeats = heartbeats
        self.linked = linked
        self._alone_since: float | None = None
        self._pumped_at = float("-inf")
        self._scrub: int | None = None
        self._witnesses_asked_until = -math.inf
        self.followers = Followers(rules=rules, membership=membership)
        self._served_since = math.inf
        self._listens_since = math.inf
        self._waits_since = math.inf
        self._short_since = math.inf
        self._few_reported_until = -math.inf
        self._unverified_since = math.inf
        self._damaged = self.catch_up.damaged

    @staticmethod
    def _new_catch_up(rules: RunRules, membership: Membership, chains: ChainBook) -> CatchUp:
        me = membership.me
        far = FarVoters(
            me=me.peer,
            draw_nonce=lambda now: int.from_bytes(me.sign(b"nonce" + repr(now).encode())[:7], "little"),
            num_spans=rules.num_spans,
            answer_seconds=rules.silence_seconds,
            pause_seconds=rules.clock.round_seconds,
        )
        return CatchUp(far=far, rules=_catch_up_rules(rules), chains=chains)

    # -- what others learn, and who can be asked

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        """Return the tips that heartbeats publish; none while spans are missing or an abandoned branch is replaced."""
        if not self.serves_state or self.catch_up.is_adopting:
            return ()
        return self._heartbeats.closed_heads(now)

    def donors(self, now: float) -> list[PeerId]:
        """Return linked peers to fetch from: those that are ready or, if there are none, all that hold the state.

        Only members and the founder can be donors, and only if they follow the chain of rosters in force here: the
        state of others may have to be abandoned. Strangers are not trusted.
        """
        roster = self.membership.book.in_force
        if roster is None:
            return []
        holders = self._holders(now)
        members = {peer: beat for peer, beat in holders.items() if roster.member(peer) is not None}
        ready = [peer for peer, beat in members.items() if beat.ready]
        # The state of a founder that is not a member is old, unless it follows the run.
        return (ready or list(members)) + [p for p, beat in holders.items() if p not in members and beat.ready]

    def sources(self, now: float) -> list[PeerId]:
        """Return linked peers to fetch whole spans from. Spans are large, so thin lines are avoided.

        These are donors with bandwidth to spare or, if there are none, a founder that still holds the initial state. A
        founder that trains and is not ready is not a donor. It is asked only if there is no other, because it may hold
        what all members have lost.
        """
        holders = self._holders(now)
        donors = self.donors(now)
        wide = [peer for peer in donors if holders[peer].share == FULL_SHARE]
        return wide or [peer for peer, beat in holders.items() if not beat.trains] or donors or list(holders)

    def _ready_strangers(self, now: float) -> list[PeerId]:
        """Return the strangers that a lone member asks for entries until it is ready: all that report that they are.

        It may have lost its state, or returned to an older one, while peers that are not members hold the entries that
        it made since. Strangers are asked only for entries, which prove themselves. A lie about their tips costs time,
        so they are asked no longer than a stall takes. A ready member asks no stranger, because it cannot contribute to
        a span while it fetches entries for it.
        """
        book, patience = self.membership.book, self.rules.stalled_cycles * self.rules.cycle_seconds
        roster = book.in_force
        if roster is None or roster.peers() != {self.membership.me.peer}:
            return []
        if self.membership.ready or now - self._listens_since >= patience:
            return []
        return [
            peer
            for peer, beat in sorted(self.membership.alive(now).items())
            if beat.heads and beat.ready and peer in self.linked and book.is_on_chain(beat.roster)
        ]

    def _is_donor(self, sender: PeerId, beat: Heartbeat, now: float) -> bool:
        """Return whether a peer on our chain, which has just sent `beat`, is one of the donors."""
        if not self._may_give(sender):
            return False
        if beat.ready and not self.membership.has_left(sender, beat.incarnation):
            return bool(beat.heads) and sender in self.linked
        return sender in self.donors(now)

    def is_past_branch(self, sender: PeerId, entry: Entry) -> bool:
        """Return whether the unknown roster of an entry belongs to an abandoned branch, so that it will never arrive.

        A peer that follows our own roster may hold entries of a branch that was abandoned since, if its log continued
        where no other peer had one. It cannot prove that they are valid, but it can serve the whole span.
        """
        heard = self.membership.peer_views.get(sender)
        return heard is not None and heard.heartbeat.roster == self.membership.book.in_force_digest

    def _holders(self, now: float) -> dict[PeerId, Heartbeat]:
        book = self.membership.book
        return {
            peer: beat
            for peer, beat in sorted(self.membership.alive(now).items())
            if beat.heads and peer in self.linked and self._may_give(peer) and book.is_on_chain(beat.roster)
        }

    def _may_give(self, peer: PeerId) -> bool:
        """Return whether a peer may serve state: a member of the roster in force, or the founder."""
        roster = self.membership.book.in_force
        return roster is not None and (roster.member(peer) is not None or peer == self._founder())

    def _founder(self) -> PeerId:
        """Return the only member of roster 0, which the organiser has signed."""
        return self.membership.book.founder

    def _look(self, now: float) -> None:
        """Update the peers whose answers count."""
        membership, book = self.membership, self.membership.book
        roster, grid = book.in_force, book.grid()
        if roster is None or grid is None:
            return
        self._short_since = min(self._short_since, now) if self.catch_up.lacks_names else math.inf
        holders = self._holders(now)
        self._listens_since = min(self._listens_since, now) if holders else math.inf
        alive = membership.alive(now)
        empty = [peer for peer, beat in alive.items() if peer in self.linked and not beat.heads]
        gone = frozenset(
            m.peer for m in roster.members if membership.has_left(m.peer, m.incarnation) and m.peer not in holders
        )
        voices = voices_for(
            me=membership.me.peer,
            can_be_dialled=membership.can_be_dialled,
            is_ready=membership.ready,
            has_listened=now - self._listens_since >= self.rules.silence_seconds,
            roster=roster,
            grid=grid,
            founder=self._founder(),
            gone=gone,
            holders=holders,
            empty=empty,
        )
        namers = namers_for(
            me=membership.me.peer,
            voices=voices,
            is_ready=membership.ready,
            has_waited=self._has_waited(now),
            is_parted=self.catch_up.is_parted,
            roster=roster,
            is_grid=len(grid.rows) > 1,
            gone=gone,
            linked=[peer for peer in alive if peer in self.linked and self._may_give(peer)],
            holders=holders,
            ready=[peer for peer, beat in holders.items() if beat.ready],
            empty=empty,
            told=self.catch_up.signed(now, holds=True),
            told_empty=self.catch_up.signed(now, holds=False),
        )
        self.catch_up.listen_to(namers if namers.is_strict else voices, namers)

    def _has_waited(self, now: float) -> bool:
        """Return whether names have been missing for as long as a stall takes, and all far voters were asked."""
        is_long = now - self._short_since >= self.rules.stalled_cycles * self.rules.cycle_seconds
        return is_long and self.catch_up.far.have_all_been_asked(self.catch_up.namers.far, now)

    def _begin_anew(self, now: float) -> list[Action]:
        """Become a newcomer again if the roster continues without this peer and no entries lead to the others' tips.

        A ready peer follows only more than half of the electorate, whose answers about a moving tip arrive too late.
        """
        roster, me = self.membership.book.in_force, self.membership.me.peer
        if not self.membership.ready or roster is None or roster.member(me) is not None or not self._has_waited(now):
            return []
        self.membership.set_ready(False)
        text = (
            f"roster {roster.k} continues without this peer, and no peer has the entries since; "
            "catching up as a newcomer"
        )
        return [Report(topic="ready", text=text)]

    def is_needless(self, now: float) -> bool:
        """Return whether others can serve the state that this peer holds without training. Call about once a second.

        They must have been able to for a while: a peer that has just become ready has not published its line's share.
        """
        self._served_since = min(self._served_since, now) if self._others_serve(now) else math.inf
        return now - self._served_since >= self.rules.silence_seconds

    def _others_serve(self, now: float) -> bool:
        """Return whether a ready reducer has bandwidth to spare, or several members are ready and none fetches here."""
        roster, alive = self.membership.book.in_force, self.membership.alive(now)
        if not self.serves_state or roster is None or roster.k == 0 or self.follows:
            return False
        beats = [(member, alive[member.peer]) for member in roster.members if member.peer in alive]
        ready = [(member, beat) for member, beat in beats if beat.ready and member.trains]
        if any(member.reduces and beat.can_be_dialled and beat.share == FULL_SHARE for member, beat in ready):
            return True
        return len(ready) >= ENOUGH_READY and not self.followers.are_fetching(now)

    def drop(self) -> None:
        """Stop holding and fetching vectors."""
        self.serves_state = False
        self.membership.set_ready(False)
        self.catch_up.forget()

    # -- finding differences

    def adopt_branch(self) -> None:
        """Switch to another branch of rosters: fetch what differs, and do not count as ready until then.

        A fragment may have matched the others when this round began, and have absorbed an entry of the old branch
        since. So its current tips are compared, not those at the beginning of the round.
        """
        self.membership.set_ready(False)
        self._heartbeats.thaw()
        self.catch_up.adopt()

    def begin_round(self, round_index: int) -> list[Action]:
        """Begin a new scrub every `scrub_cycles` cycles, on all peers in the same round, because memory can fail.

        Returns:
            Requests to rebuild damaged spans that could not be replaced so far.
        """
        scrub = self.rules.clock.cycle(round_index) // self.rules.scrub_cycles
        if scrub != self._scrub:
            self._scrub = scrub
            self.catch_up.scrub.begin_again()
        damaged = self._damaged.items()
        waiting = [span for span, is_asked in damaged if not is_asked and not self.catch_up.is_transferred(span)]
        self._damaged.update(dict.fromkeys(waiting, True))
        return [RebuildSpan(span=span) for span in waiting]

    def compare(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        """Compare a peer's fragments with ours, and send requests where they differ."""
        actions: list[Action] = []
        if not self.follows or not self.membership.book.is_on_chain(beat.roster):
            return actions
        clock, heartbeats, catch_up = self.rules.clock, self._heartbeats, self.catch_up
        for fragment, theirs in enumerate(beat.heads[: len(self.rules.num_spans)]):
            mine = heartbeats.boundary_digest(fragment)
            if mine is None or clock.closed_round(fragment, now) != theirs.round:
                continue
            if mine == theirs.digest:
                catch_up.stands_level(fragment, sender)
            if mine != theirs.digest:
                self._look(now)
                asked = {*catch_up.voices.askable, *self._ready_strangers(now)}
                if self._is_donor(sender, beat, now) or sender in asked:
                    actions += catch_up.ask_heads(fragment, sender, now)
            elif self._may_give(sender):
                catch_up.adopted(fragment)
                # A peer becomes ready by the answers of donors only, not of any peer with the same tips.
                if self.serves_state and (self.membership.ready or self._is_donor(sender, beat, now)):
                    actions += catch_up.ask_content(fragment, sender, now)
        return actions

    @property
    def follows(self) -> bool:
        """Return whether this peer follows the logs: it trains or archives, or is or should be on the roster."""
        roster, me = self.membership.book.in_force, self.membership.me
        is_listed = roster is not None and roster.member(me.peer) is not None
        return me.trains or me.archives or is_listed or self.membership.is_needed()

    # -- fetching, and being ready

    def pump(self, now: float) -> list[Action]:
        """Request what is missing. Become ready once nothing is missing and others hold the same bytes."""
        if now - self._pumped_at > self.rules.silence_seconds:
            self.not_alone(now)  # this process has slept, and messages sent meanwhile are still to arrive
        self._pumped_at = now
        if not self.follows or self.membership.book.in_force is None:
            return []
        if self.membership.ready and self.catch_up.is_complete() and not self.catch_up.is_parted:
            self.serves_state, self._alone_since = True, now
            return []  # the common case, at every tick and after every message
        donors = self.donors(now)
        if donors or self._alone_since is None:
            self._alone_since = now
        if self._is_left_alone(now):
            self.catch_up.stop_waiting()
        self.catch_up.want_everything()
        self._look(now)
        self.membership.note_signed_rosters(self.catch_up.far.rosters)
        actions = self._begin_anew(now)
        actions += self.catch_up.ask_far([0], now) if self.membership.doubts and not self.membership.ready else []
        holders = list(self._holders(now))
        able = [*(donors or holders), *self._ready_strangers(now)]
        actions += self.catch_up.pump(able, now, self.sources(now), holders) + self._say_waiting(now)
        if not self.membership.ready:
            actions += self._compare_kept()
        if self.catch_up.is_complete():
            self.serves_state = True
            if not self.membership.ready and not self.membership.leaving:
                actions += self._become_ready(donors, now)
        elif not self.membership.ready and self.catch_up.lacks_entries_only():
            unheard = [donor for donor in donors if not self.catch_up.scrub.is_ahead(donor, now)]
            actions += self._ask_witnesses(unheard, now) if unheard else []
        return actions

    def _compare_kept(self) -> list[Action]:
        """Return the comparisons with answers whose tips this peer has reached since they came."""
        actions: list[Action] = []
        for fragment, num_spans in enumerate(self.rules.num_spans):
            heads = self.chains.fragment_heads(fragment, num_spans)
            if heads is not None:
                actions += self.catch_up.scrub.due(fragment, [head.digest for head in heads])
        return actions

    def _become_ready(self, donors: list[PeerId], now: float) -> list[Action]:
        roster = self.membership.book.in_force
        assert roster is not None
        if roster.peers() != {self.membership.me.peer}:  # else there is only a founder to compare with
            donors = [donor for donor in donors if roster.member(donor) is not None]
        namers = self.catch_up.namers
        self.catch_up.scrub.limit_to({*donors, *namers.heard, *namers.far})
        compared = counted(min(len(donors), 2), "peer")
        text = f"ready: state compared with {compared}" if donors else "ready: no other peer is here"
        if not donors:
            if roster.member(self.membership.me.peer) is None or not self._is_left_alone(now):
                return []
        elif not self.catch_up.scrub.is_verified(donors, namers):
            self._unverified_since = min(self._unverified_since, now)
            is_long = now - self._unverified_since >= self.rules.stalled_cycles * self.rules.cycle_seconds
            if not is_long or roster.voters != {self.membership.me.peer}:
                return self._ask_witnesses(donors, now)
            text = "ready: others hold different bytes, but only this peer votes"
        self._unverified_since = math.inf
        self.membership.set_ready(True)
        return [Report(topic="ready", text=text)]

    def _say_waiting(self, now: float) -> list[Action]:
        """Report, after a while, that a fetched span waits for a majority to name it, and which voices are in contact.

        If enough voices are in contact, it comes later: their answers agree only if they are about the same entry.
        """
        if self.catch_up.goes_by_few and now >= self._few_reported_until:
            self._few_reported_until = now + REPORT_AGAIN_SILENCES * self.rules.silence_seconds
            return [Report(topic="majority", text=self.catch_up.namers.sentence_of_few())]
        if not self.catch_up.is_waiting_for_a_majority:
            self._waits_since = math.inf
            return []
        if math.isinf(self._waits_since):
            self._waits_since = now
        namers, patience_seconds = self.catch_up.namers, 2 * self.rules.silence_seconds
        if len(namers.heard | namers.told) >= namers.needed:
            patience_seconds += self.rules.stalled_cycles * self.rules.cycle_seconds
        if now - self._waits_since < patience_seconds:
            return []
        self._waits_since = now + REPORT_AGAIN_SILENCES * self.rules.silence_seconds
        return [Report(topic="majority", text=namers.sentence())]

    def set_back(self, now: float) -> None:
        """Restart all requests: the clock was far ahead, so the times of earlier ones lie in the future."""
        self._alone_since = self._pumped_at = now
        self._waits_since = self._served_since = self._listens_since = self._short_since = math.inf
        self._carrier = Carrier(seconds=self.rules.silence_seconds)
        self._witnesses_asked_until = -math.inf
        self.catch_up.far.forget()
        if not self.membership.ready:
            before = self.catch_up
            self.catch_up = self._new_catch_up(self.rules, self.membership, self.chains)
            self._damaged = self.catch_up.damaged
            self._damaged.update(before.damaged)
            if before.is_adopting:
                self.catch_up.adopt()

    def not_alone(self, now: float) -> None:
        """Note that a peer that can serve state is here, or may be."""
        self._alone_since = now

    def _is_left_alone(self, now: float) -> bool:
        """Return whether no peer that could serve state has been here for a while."""
        return self._alone_since is not None and now - self._alone_since > 2 * self.rules.silence_seconds

    def _ask_witnesses(self, donors: list[PeerId], now: float) -> list[Action]:
        """Request content digests a few times in each round, from other donors in the next.

        A donor's fragment may have moved on since its last heartbeat. If digests were requested only after heartbeats,
        and a donor sent one per round, always at the same moment, every comparison could differ.
        """
        if now < self._witnesses_asked_until:
            return []
        self._witnesses_asked_until = now + self.rules.clock.round_seconds / ASKS_IN_A_ROUND
        first = self.rules.clock.round_at(now) % len(donors)
        witnesses = [*donors[first:], *donors[:first]][:WITNESSES]
        fragments = range(len(self.rules.num_spans))
        asks = [ask for f in fragments for donor in witnesses for ask in self.catch_up.ask_content(f, donor, now)]
        return asks + self.catch_up.ask_far(fragments, now)

    def content_compared(
        self, peer: PeerId, fragment: int, num_equal: int, differing: Iterable[SpanId], now: float
    ) -> list[Action]:
        """Take the result of a `CompareContent`. Ignore spans that are being fetched: a new fetch would start over."""
        self._look(now)
        namers = self.catch_up.namers
        differing = [span for span in differing if not self.catch_up.is_transferred(span)]
        rebuild, overruled = self.catch_up.scrub.compared(peer, fragment, num_equal, differing, now, namers)
        actions: list[Action] = []
        for span in rebuild:
            text = f"{span} differs from what {short_peer_id(peer)} holds; checking it against this disk"
            actions += [Report(topic="content", text=text), RebuildSpan(span=span)]
        for span in overruled:
            actions += self._overrule(span)
        return actions + self.pump(now)

    def span_rebuilt(self, span: SpanId, head: SpanHead | None, state: bytes | None, now: float) -> list[Action]:
        """Take the result of a `RebuildSpan`.

        Args:
            head: the tip at which the span was rebuilt; None if the disk does not reach it.
            state: the bytes that the span should have; None if it has them.
        """
        scrub, mine = self.catch_up.scrub, self.chains.heads.get(span)
        if span in self._damaged:
            return self._damaged_rebuilt(span, head, state, now)
        if head is not None and (mine is None or head.digest != mine.digest):
            scrub.forget_rebuild(span)  # it has moved on; the next comparison asks again
            return []
        if not scrub.rebuilt(span):
            return []
        if head is not None and state is not None:
            text = f"{span} was damaged in memory; repaired from the checkpoint and the entries on this disk"
            return [Report(topic="content", text=text), self.catch_up.mend(span, head, state), *self.pump(now)]
        self._look(now)
        if scrub.overrulers(span, self.catch_up.namers):
            return [*self._overrule(span), *self.pump(now)]
        if head is None:
            return [*self._break_tie(span), *self.pump(now)]
        text = f"{span} matches this disk; peers that differ must be wrong"
        return [Report(topic="content-sound", text=text), *self._ask_electorate(span.fragment, now)]

    def _ask_electorate(self, fragment: int, now: float) -> list[Action]:
        """Ask all voters at once for their digests of a fragment.

        If a bit flipped before the checkpoint, this peer's disk is wrong too. Only answers about the same entry make a
        majority, and if a peer has few links, most voters are far.
        """
        self.catch_up.scrub.ask_again(fragment)
        heard = sorted(self.catch_up.namers.heard)
        asks = [ask for voter in heard for ask in self.catch_up.ask_content(fragment, voter, now)]
        return asks + self.catch_up.ask_far([fragment], now)

    def span_hashed(self, span: SpanId, head: SpanHead, content: Digest, now: float) -> list[Action]:
        """Take the result of a `HashSpan`."""
        self._look(now)
        return self.catch_up.span_hashed(span, head, content, now) + self.pump(now)

    def span_damaged(self, span: SpanId, reason: str, now: float) -> list[Action]:
        """Rebuild a span whose replica could not follow a valid entry. It stays unchanged until it is replaced."""
        self._damaged[span] = True
        text = f"{span} could not follow an entry: {reason}; its memory is damaged, rebuilding it from this disk"
        return [Report(topic="content", text=text), RebuildSpan(span=span)]

    def _damaged_rebuilt(self, span: SpanId, head: SpanHead | None, state: bytes | None, now: float) -> list[Action]:
        """Replace a damaged span at its current tip, with the bytes of others if this disk does not reach it."""
        mine = self.chains.heads.get(span)
        if mine is not None and head is not None and head.digest != mine.digest:
            return [RebuildSpan(span=span)]  # the log moved on meanwhile
        if mine is None or head is None or state is None:
            donors = self.donors(now)
            self._damaged[span] = False  # until the next round, or until what is fetched is given up
            if not donors:
                text = f"{span} cannot be rebuilt from this disk, and no peer here can serve it; it stays unchanged"
                return [Report(topic="content", text=text)]
            self.catch_up.want_transfer(span, donors[0])
            text = f"{span} cannot be rebuilt from this disk; fetching it again"
            return [Report(topic="content", text=text), *self.pump(now)]
        text = f"{span} was damaged in memory; repaired from the checkpoint and the entries on this disk"
        return [Report(topic="content", text=text), self.catch_up.mend(span, head, state), *self.pump(now)]

    def parent_rebuilt(
        self, span: SpanId, tip: Digest, parent: SpanHead | None, state: bytes | None, now: float
    ) -> list[Action]:
        """Take the result of a `RebuildParent`."""
        self._look(now)
        return self.catch_up.parent_rebuilt(span, tip, parent, state, now) + self.pump(now)

    def _overrule(self, span: SpanId) -> list[Action]:
        text = f"{span} differs from what a majority holds; fetching it again"
        self.catch_up.overrule(span, self.catch_up.scrub.overrulers(span, self.catch_up.namers))
        return [Report(topic="content", text=text)]

    def _break_tie(self, span: SpanId) -> list[Action]:
        """Settle a difference from the only other member that this peer's disk cannot decide: one of the two must move.

        The peer with the greater key moves at once. The other one moves if they still differ in the next scrub: then
        the first one's disk has confirmed its bytes. With more members, a majority decides.
        """
        namers, accusers = self.catch_up.namers, self.catch_up.scrub.accusers(span)
        other = accusers[0]
        if len(namers.near) != 1 or other not in namers.near:
            text = f"{span} differs from what {short_peer_id(other)} holds, and this disk cannot decide; keeping it"
            return [Report(topic="content", text=f"{text} unless a majority disagrees")]
        moves = self.membership.me.peer > other or self.catch_up.scrub.is_unsettled(span)
        what = "fetching it from that peer" if moves else "keeping it, because the other peer has to move"
        text = f"{span} differs from what {short_peer_id(other)} holds, and no checkpoint here can decide; {what}"
        if moves:
            self.catch_up.scrub.moved(span)
            self.catch_up.yield_to(span, other)
        return [Report(topic="content", text=text)]

    # -- questions and answers

    def take(self, sender: PeerId, message: Message, now: float) -> list[Action]:
        """Answer a question or take an answer. Any other message is dropped."""
        match message:
            case HeadsRequest():
                return self._answer_heads(sender, message.fragment, now)
            case HeadsReply():
                return self._take_heads(sender, message, now)
            case EntryRequest():
                self.followers.asked(sender, now)
                return [self._answer_entry(sender, message, now)]
            case EntryAbsent():
                self.catch_up.heard(sender, now)
                absent = self.catch_up.entry_absent(sender, message.span, message.parent, now)
                return absent + self.pump(now)
            case SpanRequest() if self.serves_state and message.span in self.chains.heads:
                self.followers.asked(sender, now)
                return [_serving(sender, message)]
            case SpanReply() if message.span in self.rules.span_elements:
                self.catch_up.heard(sender, now)
                return self.catch_up.take_span(sender, message, now) + self.pump(now)
            case ContentRequest() if self.serves_state and self._holds(message.fragment):
                return [ServeContent(to=sender, fragment=message.fragment)]
            case ContentReply():
                self._look(now)
                settled = self.catch_up.take_content(sender, message, now)
                actions = [*settled, *self.pump(now)] if settled else []
                return actions + (self._take_content(sender, message, now) if self._holds(message.fragment) else [])
            case SignedContentRequest() if message.fragment < len(self.rules.num_spans):
                return self._answer_or_carry(sender, message, now)
            case SignedContent():
                return self._take_signed(sender, message, now)
            case _:
                return []

    def _answer_or_carry(self, sender: PeerId, question: SignedContentRequest, now: float) -> list[Action]:
        if question.voter == self.membership.me.peer:
            if self.catch_up.is_adopting:
                return []  # it will soon hold something else
            if self.serves_state and self._holds(question.fragment):
                return [ServeContent(to=sender, fragment=question.fragment, question=question)]
            return [self._send(sender, self.sign_content(question, ()), now)]
        to = self._carrier.carry(sender, question, self._ways(sender, question), now)
        return [self._send(to, question, now)] if to is not None else []

    def _ways(self, sender: PeerId, question: SignedContentRequest) -> list[PeerId]:
        """Return the peers that a question can be forwarded to: its voter, or neighbours of the voter.

        Neighbours are used only if the sender is the requester itself.
        """
        if sender != question.requester and not self._may_give(sender):
            return []
        if question.voter in self.linked:
            return [question.voter]
        book = self.membership.book
        roster, grid = book.in_force, book.grid()
        if sender != question.requester or roster is None or grid is None:
            return []
        parent = book.parent_of(roster)  # the requester may still follow that one
        if question.voter not in roster.voters.union(parent.voters if parent is not None else ()):
            return []
        return sorted(self.linked & grid.neighbours(question.voter) - {sender})

    def _take_signed(self, sender: PeerId, answer: SignedContent, now: float) -> list[Action]:
        if answer.requester != self.membership.me.peer:
            return [self._send(to, answer, now) for to in self._carrier.bring(sender, answer, now) if to in self.linked]
        if not self.catch_up.far.expects(answer):
            return []
        if not self._verify(answer.voter, answer.statement(self.rules.run), answer.signature):
            return []  # the voter or a carrier is at fault; which one is unknown
        if not self.membership.book.is_on_chain(answer.roster):
            self.catch_up.far.rosters[answer.voter] = (answer.roster, now)
            return []  # the voter follows rosters that are not in force here, so its digests do not count
        self.catch_up.take_signed(answer, now)
        self._look(now)
        settled = self.catch_up.settle_fragment(answer.fragment, now)
        is_asked_for = not self.membership.ready or self.catch_up.scrub.is_contested(answer.fragment)
        if answer.digests and is_asked_for and self._holds(answer.fragment):
            question = self.catch_up.scrub.compare_signed(answer, sender)
            settled.append(question)
            if not self.membership.ready and self._has_gone_on(answer):
                self.catch_up.scrub.keep(question, now)
        return settled + self.pump(now)

    def _send(self, to: PeerId, message: Message, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self.rules.silence_seconds)

    def sign_content(self, question: SignedContentRequest, digests: tuple[tuple[Digest, Digest], ...]) -> SignedContent:
        """Return the signed answer to a carried question; without digests if this peer holds nothing."""
        unsigned = SignedContent(
            fragment=question.fragment,
            voter=self.membership.me.peer,
            requester=question.requester,
            nonce=question.nonce,
            roster=self.membership.book.in_force_digest or ZERO_DIGEST,
            digests=digests,
            signature=NO_SIGNATURE,
        )
        return replace(unsigned, signature=self.membership.me.sign(unsigned.statement(self.rules.run)))

    def _holds(self, fragment: int) -> bool:
        num_spans = self.rules.num_spans
        return fragment < len(num_spans) and self.chains.fragment_heads(fragment, num_spans[fragment]) is not None

    def _answer_heads(self, sender: PeerId, fragment: int, now: float) -> list[Action]:
        if fragment >= len(self.rules.num_spans) or self.catch_up.is_adopting:
            return []
        heads = self.chains.fragment_heads(fragment, self.rules.num_spans[fragment])
        if heads is None:
            return []
        deadline = now + self.rules.clock.round_seconds
        return [Send(to=sender, message=HeadsReply(fragment=fragment, heads=heads), deadline=deadline)]

    def _answer_entry(self, sender: PeerId, request: EntryRequest, now: float) -> Action:
        deadline = now + self.rules.clock.round_seconds
        entry = self.chains.entry_after(request.span, request.parent)
        head = self.chains.heads.get(request.span)
        if entry is None and head is not None and head.digest != request.parent:
            return ServeEntry(to=sender, span=request.span, parent=request.parent)
        absent = EntryAbsent(span=request.span, parent=request.parent)
        return Send(to=sender, message=entry or absent, deadline=deadline)

    def _take_heads(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        if not self.catch_up.take_heads(sender, reply):
            return []
        self._look(now)
        actions = self.catch_up.note_differences(sender, reply, now) + self.pump(now)
        heads = self.chains.fragment_heads(reply.fragment, self.rules.num_spans[reply.fragment])
        stands_level = heads is not None and [one.digest for one in heads] == [one.digest for one in reply.heads]
        if self.serves_state and stands_level:
            # Boundaries are as old as the round. A peer that has caught up since would wait for the next one. With a
            # single fragment, whose boundary moves with every entry, it would wait for ever.
            actions += self.catch_up.ask_content(reply.fragment, sender, now)
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
        if self.membership.ready or not self._has_gone_on(reply):
            return [question]
        self.catch_up.scrub.keep(question, now)
        if sender not in self.donors(now):
            return [question]
        return [question, *self.catch_up.ask_heads(reply.fragment, sender, now)]

    def _has_gone_on(self, reply: ContentReply | SignedContent) -> bool:
        """Return whether a peer has a tip that ours has never been at. A peer at an earlier tip has nothing for us."""
        for index, (digest, _) in enumerate(reply.digests[: self.rules.num_spans[reply.fragment]]):
            span = SpanId(reply.fragment, index)
            if digest != self.chains.heads[span].digest and self.chains.entry_after(span, digest) is None:
                return True
        return False


def _serving(to: PeerId, request: SpanRequest) -> ServeSpan:
    return ServeSpan(
        to=to, span=request.span, version=request.version, offset=request.offset, most_bytes=request.most_bytes
    )


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
