"""One round after the other at one peer: closes what is over, begins what is next, counts the cycles that were void."""

from __future__ import annotations

from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.actions import Action, RoundClosed
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.rules import RunRules


class Turns:
    """Which round this peer is in and how the last ones went. A state machine without I/O."""

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
        """Return the round that has begun since the last tick, or None; void cycles are counted on the way."""
        has_jumped = self._last_tick is not None and abs(now - self._last_tick) > self._rules.clock.round_seconds
        self._last_tick = now
        current = self._rules.clock.round_at(now)
        if has_jumped:  # it slept, or the clock was set
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
        """Count an entry that was absorbed: the swarm goes on."""
        self._membership.void_cycles = 0
        self._membership.entry_absorbed(round_index)
        self._entries_in_cycle += 1
        if round_index == self.round:
            self._included_in_round += num_included

    def waited(self) -> None:
        """Note that this peer makes no entries in this round of its own accord: its cycle is no void one."""
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
        """Count a cycle without entries, if this peer has a part in the run and sat through all of it awake.

        A cycle in which another roster governed says nothing of this one, which may have its first round before it; nor
        does one in which the voters are here and none of them has made a step.
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
                self._membership.void_cycles += 1
            self._entries_in_cycle = 0

    def _has_part(self) -> bool:
        """Return whether this peer is a member, or follows the logs of those who are."""
        roster, peer = self._membership.book.in_force, self._membership.me.peer
        return roster is not None and (self._membership.ready or roster.member(peer) is not None)
