"""How one peer finds out that it lacks something, fetches it, becomes ready, and answers others that ask.

`CatchUp` knows what is missing; this page knows who can be asked, when a peer holds the agreed state, and what happens
when another branch of rosters turns out to be senior: the whole run goes by one branch, so spans that differ are
fetched from its members, even where our own log is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.actions import Action, Report, Send, ServeContent, ServeSpan
from p2p_diloco.protocol.beacon import Beacon
from p2p_diloco.protocol.catch_up import WITNESSES, CatchUp, CatchUpRules
from p2p_diloco.protocol.chain import ChainBook
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    FragmentHead,
    HeadsReply,
    HeadsRequest,
    Heartbeat,
    Message,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.protocol.rules import RunRules

BYTES_PER_ELEMENT_OF_STATE = 8
ASKS_IN_A_ROUND = 8


class Repair:
    """One peer's repairs. A state machine without I/O.

    Args:
        linked: peers to which messages can be sent now; shared with the engine, which keeps it.
    """

    def __init__(
        self, *, rules: RunRules, membership: Membership, chains: ChainBook, beacon: Beacon, linked: set[PeerId]
    ) -> None:
        self.catch_up = CatchUp(rules=_catch_up_rules(rules), chains=chains)
        self.serves_state = False
        self._rules = rules
        self._membership = membership
        self._chains = chains
        self._beacon = beacon
        self._linked = linked
        self._alone_since: float | None = None
        self._checked_in_cycle = 0
        self._witnesses_asked_until = -math.inf

    # -- what others may hear

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        """Return what heartbeats say of the state; nothing while spans are missing or of a branch given up."""
        if not self.serves_state or self.catch_up.is_adopting:
            return ()
        return self._beacon.closed_heads(now)

    def donors(self, now: float) -> list[PeerId]:
        """Return linked peers to fetch from: those that are ready, or when there are none, all that hold the state.

        Only peers that go by the chain of rosters in force here: others hold what may have to be given up.
        """
        alive = self._membership.alive(now)
        book = self._membership.book
        holders = sorted(
            peer
            for peer, beat in alive.items()
            if beat.heads and peer in self._linked and book.is_on_chain(beat.roster)
        )
        return [peer for peer in holders if alive[peer].ready] or holders

    # -- finding out

    def adopt_branch(self) -> None:
        """Go by another branch of rosters from now on: fetch what differs, and be no member before."""
        self._membership.ready = False
        self.catch_up.adopt()

    def begin_round(self, round_index: int) -> None:
        """Once in a while let contents be compared again: memory can fail."""
        cycle = self._rules.clock.cycle(round_index)
        if cycle >= self._checked_in_cycle + self._rules.scrub_cycles:
            self._checked_in_cycle = cycle
            self.catch_up.check_again()

    def compare(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        """Compare a peer's fragments with ours, and ask where they differ."""
        actions: list[Action] = []
        if not self.follows or not self._membership.book.is_on_chain(beat.roster):
            return actions
        clock, beacon, catch_up = self._rules.clock, self._beacon, self.catch_up
        for fragment, theirs in enumerate(beat.heads[: len(self._rules.num_spans)]):
            mine = beacon.boundary_digest(fragment)
            if mine is None or clock.closed_round(fragment, now) != theirs.round:
                continue
            if mine != theirs.digest:
                # One that is not ready may stand higher with an entry that the ready ones lack and it cannot give: they
                # would wait for it for ever, and it for them.
                if sender in self.donors(now):
                    actions += catch_up.ask_heads(fragment, sender, now)
            elif self.serves_state:
                catch_up.adopted(fragment)
                actions += catch_up.ask_content(fragment, sender, now)
        return actions

    @property
    def follows(self) -> bool:
        """Tell whether this peer goes along with the logs: it trains, or is the hub of those who cannot be dialled."""
        return self._membership.me.trains or self._membership.is_hub()

    # -- fetching, and being ready

    def pump(self, now: float) -> list[Action]:
        """Ask for what is missing; become ready once nothing is and others hold the same bytes."""
        if not self.follows or self._membership.book.in_force is None:
            return []
        if self._membership.ready and self.catch_up.is_complete():
            self.serves_state, self._alone_since = True, now
            return []  # the common case, at every tick and after every message
        donors = self.donors(now)
        if donors or self._alone_since is None:
            self._alone_since = now
        self.catch_up.want_everything()
        actions = self.catch_up.pump(donors, now)
        if self.catch_up.is_complete():
            self.serves_state = True
            if self._membership.me.trains and not self._membership.ready and not self._membership.leaving:
                actions += self._become_ready(donors, now)
        return actions

    def _become_ready(self, donors: list[PeerId], now: float) -> list[Action]:
        roster = self._membership.book.in_force
        assert roster is not None
        assert self._alone_since is not None
        if not donors:
            waited = now - self._alone_since > 2 * self._rules.silence_seconds
            if roster.member(self._membership.me.peer) is None or not waited:
                return []
        elif not self.catch_up.is_verified(donors):
            return self._ask_witnesses(donors, now)
        self._membership.ready = True
        text = f"ready: state compared with {min(len(donors), 2)} peers" if donors else "ready: nobody else is here"
        return [Report(topic="ready", text=text)]

    def _ask_witnesses(self, donors: list[PeerId], now: float) -> list[Action]:
        """Ask for content digests a few times in each round, of other donors in the next.

        A donor's fragment may have moved on since its last sign of life. Asked only after those, a peer whose donor
        speaks once in a round, always at the same moment, would compare what differs for ever.
        """
        if now < self._witnesses_asked_until:
            return []
        self._witnesses_asked_until = now + self._rules.clock.round_seconds / ASKS_IN_A_ROUND
        first = self._rules.clock.round_at(now) % len(donors)
        witnesses = [*donors[first:], *donors[:first]][:WITNESSES]
        fragments = range(len(self._rules.num_spans))
        return [ask for f in fragments for donor in witnesses for ask in self.catch_up.ask_content(f, donor, now)]

    def content_compared(
        self, peer: PeerId, fragment: int, num_equal: int, differing: Iterable[SpanId], now: float
    ) -> list[Action]:
        """Take the result of a `CompareContent`."""
        # Who is not ready is never the truth: where there is but one donor, as for a peer at home, its word will do.
        num_donors = len(self.donors(now)) if not self._membership.ready else WITNESSES
        num_accusers = max(min(WITNESSES, num_donors), 1)
        wrong = self.catch_up.content_compared(peer, fragment, num_equal, differing, num_accusers)
        reports: list[Action] = [
            Report(topic="content", text=f"{span} differs from what others hold; fetching it again") for span in wrong
        ]
        return reports + self.pump(now)

    # -- questions and answers

    def take(self, sender: PeerId, message: Message, now: float) -> list[Action]:
        """Answer a question, or take an answer; anything else is dropped."""
        match message:
            case HeadsRequest():
                return self._answer_heads(sender, message.fragment, now)
            case HeadsReply():
                return self._take_heads(sender, message, now)
            case EntryRequest():
                entry = self._chains.entry_after(message.span, message.parent)
                absent = EntryAbsent(span=message.span, parent=message.parent)
                return [Send(to=sender, message=entry or absent, deadline=now + self._rules.clock.round_seconds)]
            case EntryAbsent():
                self.catch_up.entry_absent(sender, message.span, message.parent)
                return self.pump(now)
            case SpanRequest() if self.serves_state and message.span in self._chains.heads:
                return [ServeSpan(to=sender, span=message.span, version=message.version, offset=message.offset)]
            case SpanReply() if message.span in self._rules.span_elements:
                return self.catch_up.take_span(sender, message, now) + self.pump(now)
            case ContentRequest() if self.serves_state and self._holds(message.fragment):
                return [ServeContent(to=sender, fragment=message.fragment)]
            case ContentReply() if self._holds(message.fragment):
                return self.catch_up.take_content(sender, message)
            case _:
                return []

    def _holds(self, fragment: int) -> bool:
        num_spans = self._rules.num_spans
        return fragment < len(num_spans) and self._chains.fragment_heads(fragment, num_spans[fragment]) is not None

    def _answer_heads(self, sender: PeerId, fragment: int, now: float) -> list[Action]:
        if fragment >= len(self._rules.num_spans) or self.catch_up.is_adopting:
            return []
        heads = self._chains.fragment_heads(fragment, self._rules.num_spans[fragment])
        if heads is None:
            return []
        deadline = now + self._rules.clock.round_seconds
        return [Send(to=sender, message=HeadsReply(fragment=fragment, heads=heads), deadline=deadline)]

    def _take_heads(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        if not self.catch_up.take_heads(sender, reply):
            return []
        self.catch_up.note_differences(sender, reply)
        actions = self.pump(now)
        heads = self._chains.fragment_heads(reply.fragment, self._rules.num_spans[reply.fragment])
        if self.serves_state and heads == reply.heads:
            # Boundaries are as old as the round. Who caught up since would wait for the next one, and with a single
            # fragment, whose boundary moves with every entry, for ever.
            actions += self.catch_up.ask_content(reply.fragment, sender, now)
        return actions


def _catch_up_rules(rules: RunRules) -> CatchUpRules:
    return CatchUpRules(
        num_spans=rules.num_spans,
        span_bytes={span: BYTES_PER_ELEMENT_OF_STATE * n for span, n in rules.span_elements.items()},
        answer_seconds=max(2.0 * rules.heartbeat_seconds, 1.0),
    )
