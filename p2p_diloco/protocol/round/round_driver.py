"""The sequence of rounds at one peer: close the last round, begin the next."""

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
