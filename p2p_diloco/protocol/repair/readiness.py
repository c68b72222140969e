"""Decides when this peer holds the agreed state, and may be a member."""

from __future__ import annotations

import math

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.clock import Stopwatch
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.scrub import WITNESSES
from p2p_diloco.protocol.repair.sources import Sources
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.rate import counted

ASKS_IN_A_ROUND = 8
REPORT_AGAIN_SILENCES = 16


class Readiness:
    """Compares the state with others until it is ready. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, membership: Membership, sources: Sources) -> None:
        self._rules = rules
        self._membership = membership
        self._sources = sources
        self.alone_since: float | None = None
        """When a peer that can serve state was last here, or may have been."""
        self._awake_at = -math.inf
        self._witnesses_asked_until = -math.inf
        self._unverified = Stopwatch()
        self._unnamed_since = math.inf
        self._few_reported_until = -math.inf

    def set_back(self, now: float) -> None:
        """Begin anew: the clock was far ahead, so earlier times lie in the future."""
        self.alone_since = self._awake_at = now
        self._unnamed_since, self._witnesses_asked_until = math.inf, -math.inf

    # -- alone

    def awake(self, now: float) -> None:
        """Note that this process runs; call often. Messages sent while it slept are still to arrive."""
        if now - self._awake_at > self._rules.silence_seconds:
            self.not_alone(now)
        self._awake_at = now

    def not_alone(self, now: float) -> None:
        """Note that a peer that can serve state is here, or may be."""
        self.alone_since = now

    def is_left_alone(self, now: float) -> bool:
        """Return whether no peer that could serve state has been here for a while."""
        return self.alone_since is not None and now - self.alone_since > 2 * self._rules.silence_seconds

    # -- ready

    def become_ready(self, catch_up: CatchUp, donors: list[PeerId], now: float) -> list[Action]:
        """Become ready if enough others hold the same bytes, or if there is no other peer; else ask on."""
        roster, me = self._membership.book.in_force, self._membership.local.peer
        assert roster is not None
        if roster.peers() != {me}:  # else there is only a founder to compare with
            donors = [donor for donor in donors if roster.member(donor) is not None]
        quorum = catch_up.quorums.contents
        catch_up.scrub.limit_to({*donors, *quorum.holders, *quorum.indirect})
        text = f"ready: state compared with {counted(min(len(donors), 2), 'peer')}"
        if not donors:
            if roster.member(me) is None or not self.is_left_alone(now):
                return []
            text = "ready: no other peer is here"
        elif not catch_up.scrub.is_verified(donors, quorum):
            patience = self._rules.stalled_cycles * self._rules.cycle_seconds
            if self._unverified.note(True, now) < patience or roster.voters != {me}:
                return self.ask_witnesses(catch_up, donors, now)
            text = "ready: others hold different bytes, but only this peer votes"
        self._unverified.note(False, now)
        self._membership.local.set_ready(True)
        return [Report(topic="ready", text=text)]

    def begin_anew(self, catch_up: CatchUp, now: float) -> list[Action]:
        """Become a newcomer again if the roster continues without this peer and no entries lead to the others' tips.

        A ready peer follows only more than half of the electorate, whose answers about a moving tip arrive too late.
        """
        roster, membership = self._membership.book.in_force, self._membership
        if not membership.local.ready or roster is None or roster.member(membership.local.peer) is not None:
            return []
        if not self._sources.has_waited(catch_up, now):
            return []
        membership.local.set_ready(False)
        text = (
            f"roster {roster.k} continues without this peer, and no peer has the entries since; "
            "catching up as a newcomer"
        )
        return [Report(topic="ready", text=text)]

    def ask_witnesses(self, catch_up: CatchUp, donors: list[PeerId], now: float) -> list[Action]:
        """Request content digests a few times in each round, from other donors in the next.

        A donor's fragment may have moved on since its last heartbeat. If digests were requested only after heartbeats,
        and a donor sent one per round, always at the same moment, every comparison could differ.
        """
        if now < self._witnesses_asked_until:
            return []
        self._witnesses_asked_until = now + self._rules.clock.round_seconds / ASKS_IN_A_ROUND
        first = self._rules.clock.round_at(now) % len(donors)
        witnesses = [*donors[first:], *donors[:first]][:WITNESSES]
        fragments = range(len(self._rules.num_spans))
        asks = [ask for f in fragments for donor in witnesses for ask in catch_up.verifier.ask_content(f, donor, now)]
        return asks + catch_up.verifier.ask_indirect(fragments, now)

    def report_waiting(self, catch_up: CatchUp, now: float) -> list[Action]:
        """Report, after a while, that a fetched span waits for a majority to name it, and which peers are in contact.

        If enough of them are in contact, it comes later: their answers agree only if they are about the same entry.
        """
        quorum = catch_up.quorums.contents
        again_seconds = REPORT_AGAIN_SILENCES * self._rules.silence_seconds
        if quorum.is_few and catch_up.fetcher.transfers and now >= self._few_reported_until:
            self._few_reported_until = now + again_seconds
            return [Report(topic="majority", text=quorum.sentence_of_few())]
        if not catch_up.verifier.is_waiting_for_a_majority:
            self._unnamed_since = math.inf
            return []
        if math.isinf(self._unnamed_since):
            self._unnamed_since = now
        patience_seconds = 2 * self._rules.silence_seconds
        if len(quorum.holders | quorum.signed) >= quorum.needed:
            patience_seconds += self._rules.stalled_cycles * self._rules.cycle_seconds
        if now - self._unnamed_since < patience_seconds:
            return []
        self._unnamed_since = now + again_seconds
        return [Report(topic="majority", text=quorum.sentence())]
