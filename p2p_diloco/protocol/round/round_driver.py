"""The sequence of rounds at one peer: close the last round, begin the next, count cycles without entries."""

from __future__ import annotations

from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.actions import Action, RoundClosed
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.rules import RunRules


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
        self._entries_in_cycle = 0
        self._awake_since_cycle: int | None = None

    def tick(self, now: float) -> int | None:
        """Return the round that has begun since the last tick; None if none has. Detect sleep and clock changes."""
        has_jumped = self._last_tick is not None and abs(now - self._last_tick) > self._rules.clock.round_seconds
        self._last_tick = now
        current = self._rules.clock.round_at(now)
        if has_jumped:  # the machine slept, or its clock was set
            self._awake_since_cycle = self._rules.clock.cycle(current) + 1
        return current if current != self.round else None

    def turn(
        self, current: int, contributes: bool, now: float, left_out: frozenset[SpanId] = frozenset()
    ) -> list[Action]:
        """Close the round in progress and begin `current`."""
        actions = self._close(self.round, now) if self.round is not None else []
        self._count_void_cycle(current, now)
        self.round = current
        self._included_in_round = 0
        return actions + self._exchange.begin(current, contributes, left_out)

    def entry_absorbed(self, round_index: int, num_included: int) -> None:
        """Count an absorbed entry, which shows that the run is not stalled."""
        self._membership.cycles_without_entries = 0
        self._membership.entry_absorbed(round_index)
        self._entries_in_cycle += 1
        if round_index == self.round:
            self._included_in_round += num_included

    def waited(self) -> None:
        """Note that this peer makes no entries in this round by choice, so its cycle does not count as one without."""
        self._entries_in_cycle += 1

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
            num_ready=self._membership.num_ready(now),
            num_members=sum(member.trains for member in collection.roster.members),
        )
        return [*actions, closed]

    def _count_void_cycle(self, current: int, now: float) -> None:
        """Count a cycle without entries, if this peer takes part in the run and was awake for the whole cycle.

        Two kinds of cycles do not count: those that began before the roster in force governed, because it may not have
        had a round yet, and those in which the voters are here but none of them has made a step.
        """
        cycle = self._rules.clock.cycle(current)
        if self.round is None:
            self._awake_since_cycle = cycle + 1
        elif cycle != self._rules.clock.cycle(self.round):
            sat_through = self._awake_since_cycle is not None and self._awake_since_cycle < cycle
            first = self._rules.clock.cycle(self.round) * self._rules.clock.num_fragments
            was_governed = self._membership.in_force_since < first
            all_idle = self._membership.are_voters_idle(now)
            if self._has_part() and was_governed and sat_through and not self._entries_in_cycle and not all_idle:
                self._membership.cycles_without_entries += 1
            self._entries_in_cycle = 0

    def _has_part(self) -> bool:
        """Return whether this peer is a member, or is ready and follows the members' logs."""
        roster, peer = self._membership.book.in_force, self._membership.me.peer
        return roster is not None and (self._membership.ready or roster.member(peer) is not None)
