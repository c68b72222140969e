"""A tiny island: real anchor, momentum, in-flight list, codec and merge; inner steps are random displacements.

It takes the place of the training thread: a `Replica` whose commands wait for its next step border. The functions of
`outer/` handle φ, m, θ and what is in flight, as in a real peer. A double-entry ledger (`ledger.py`) is kept alongside.

Legend: N = elements of one span.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.ids import SpanId
from p2p_diloco.node.ports import Answer, SpanUpdate
from p2p_diloco.outer.state import (
    InFlight,
    IslandSpan,
    PreparedContribution,
    SpanState,
    follow_entry,
    prepare_contribution,
    record_contribution,
    replace_span,
)
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution
from p2p_diloco.span.fused import encode_contribution
from simulator.ledger import Ledger
from simulator.maths import MERGE, SharedMaths

TOKENS_PER_STEP = 100
STEP_SIZE = 0.02
PULL = 0.01
STEPPED_BETWEEN = 0.3
NOTHING_IN_FLIGHT = InFlight()


class Watch(Protocol):
    """An observer of an island."""

    def complain(self, invariant: str, text: str) -> None:
        """Called when the ledger does not balance."""

    def advancing(self, before: SpanState, update: SpanUpdate) -> None:
        """Called before an entry is absorbed."""

    def advanced(self, before: SpanState, update: SpanUpdate, after: SpanState) -> None:
        """Called after an entry was absorbed."""

    def replaced(self, span: SpanId, before: SpanState | None, after: SpanState) -> None:
        """Called after a span was replaced."""

    def contributed(self, contribution: FragmentContribution) -> None:
        """Called with each contribution that is sent."""


class _Snapshot(NamedTuple):
    round: int
    fragment: int
    deadline: float
    answer: Answer
    spans: frozenset[SpanId] | None


class _Replacement(NamedTuple):
    span: SpanId
    state: SpanState


class SimulatedIsland:
    """A `Replica` with a few elements per span.

    Args:
        maths: shared by the whole swarm.
        spans: all spans of the run.
        noise: random source of the inner steps and of the times of step borders.
        trains: False for a peer that only holds the agreed state.
        now: returns swarm time in seconds.
        share: returns the object that other peers hold for the same bytes.
    Attributes:
        step_seconds: duration of an inner step.
        mischief: replaces each contribution before it is sent; None: contributions are sent as made.
    """

    def __init__(
        self,
        *,
        maths: SharedMaths,
        spans: tuple[SpanId, ...],
        noise: random.Random,
        trains: bool,
        step_seconds: float,
        now: Callable[[], float],
        share: Callable[[SpanId, SpanState], SpanState],
        watch: Watch,
    ) -> None:
        self.states: dict[SpanId, SpanState] = {}
        self.local: dict[SpanId, Vector] = {}
        self.in_flight: dict[SpanId, InFlight] = {}
        self.step_seconds = step_seconds
        self.mischief: Callable[[FragmentContribution], FragmentContribution] | None = None
        self._maths = maths
        self._spans = spans
        self._noise = noise
        self._trains = trains
        self._now = now
        self._share = share
        self._watch = watch
        self._commands: deque[SpanUpdate | _Replacement | _Snapshot] = deque()
        self._border: asyncio.TimerHandle | None = None
        self._ledgers: dict[SpanId, Ledger] = {}
        self._steps_at: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    # -- the replica

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the current state of a span."""
        return self.states.get(span)

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""
        self._hand_over(update)

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Replace a span by a transferred one at the next step border."""
        self._hand_over(_Replacement(span, state))

    def request_contribution(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Contribute at the next step border."""
        self._hand_over(_Snapshot(round_index, fragment, deadline, answer, spans))

    def progress(self) -> Progress:
        """Return the progress that heartbeats report."""
        steps = self.steps_made() if self._trains else 0
        return Progress(tokens=steps * TOKENS_PER_STEP, steps=steps)

    # -- for the machine

    def hold(self, states: dict[SpanId, SpanState]) -> None:
        """Start with these spans."""
        self.states = dict(states)
        self._load()

    def drop(self) -> None:
        """Drop all spans."""
        self.states = {}

    def steps_made(self) -> int:
        """Return the number of inner steps since the start."""
        return int((self._loop.time() - self._began) / self.step_seconds)

    def slow_down(self, factor: float) -> None:
        """Make a step take `factor` times as long; if steps get faster, a pending border moves to the new pace."""
        made = self.steps_made()
        self.step_seconds *= factor
        self._began = self._loop.time() - made * self.step_seconds
        if self._border is not None and factor < 1.0:
            self._border.cancel()
            self._await_border()

    def flip_bit(self, span: SpanId, place: int, bit: int) -> bool:
        """Flip one bit of φ, as bad memory does; return False if the result is not finite or differs by more than 4."""
        state = self.states[span]
        anchor_N = state.anchor_N.copy()
        anchor_N.view(np.uint32)[place] ^= np.uint32(1 << bit)
        moved_N = anchor_N.astype(np.float64) - state.anchor_N
        if not np.isfinite(anchor_N).all() or np.abs(moved_N).max() > 4.0:
            return False
        self.states[span] = SpanState(head=state.head, anchor_N=anchor_N, momentum_N=state.momentum_N)
        if span in self._ledgers:
            self._ledgers[span].flip(moved_N)
        return True

    # -- step borders

    def _hand_over(self, command: SpanUpdate | _Replacement | _Snapshot) -> None:
        self._commands.append(command)
        if self._border is None:
            self._await_border()

    def _await_border(self) -> None:
        seconds = self._noise.random() * self.step_seconds
        self._border = self._loop.call_later(seconds, self._reach_border)

    def _reach_border(self) -> None:
        self._border = None
        while self._commands:
            command = self._commands.popleft()
            match command:
                case SpanUpdate():
                    self.absorb(command)
                case _Replacement():
                    self.take(command.span, command.state)
                case _Snapshot():
                    contribution = None
                    if self._now() <= command.deadline:
                        contribution = self.contribute(command.round, command.fragment, command.spans)
                    if contribution is not None:
                        self._watch.contributed(contribution)
                    self._loop.call_soon(command.answer, contribution)
        self._load()

    def _load(self) -> None:
        if self._trains and not self.local and len(self.states) == len(self._spans):
            self.local = {span: state.anchor_N.copy() for span, state in self.states.items()}
            self._ledgers = {span: Ledger(self._maths.span_elements) for span in self._spans}

    def absorb(self, update: SpanUpdate) -> None:
        """Follow an entry: outer step, then merge."""
        span = update.span
        before = self.states.get(span)
        if before is None and not self._trains:
            return  # dropped meanwhile
        assert before is not None, f"absorbed an entry of {span}, which is not held"
        self._watch.advancing(before, update)
        advanced = self.advance(before, update)
        if not self.local:
            self.states[span] = advanced
        else:
            if self._noise.random() < STEPPED_BETWEEN:
                self._step(span, 1)  # made since the snapshot: stays in θ
            self._keep(span, follow_entry(self._held(span), advanced=advanced, merge_rule=MERGE))
            self._resolved(span, before, update.absorbed.round)
        self._watch.advanced(before, update, advanced)

    def advance(self, before: SpanState, update: SpanUpdate) -> SpanState:
        """Return the state of a span after an entry."""
        return self._maths.follow(before, update.absorbed, update.payload)

    def take(self, span: SpanId, state: SpanState) -> None:
        """Replace a span by a transferred one; everything in flight counts as included."""
        before, after = self.states.get(span), self._share(span, state)
        if not self.local or before is None:
            self.states[span] = after
        else:
            self._keep(span, replace_span(self._held(span), replacement=after, merge_rule=MERGE))
            self._resolved(span, before, None)
        self._watch.replaced(span, before, after)

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None
    ) -> FragmentContribution | None:
        """Contribute a fragment to a round; return None if there is nothing new."""
        made = self.steps_made()
        steps = made - self._steps_at.get(fragment, 0)
        if steps <= 0 or not self.local:
            return None
        spans = []
        for span in self._spans:
            if span.fragment == fragment:
                self._step(span, steps)
                if chosen is not None and span not in chosen:
                    continue
                try:
                    spans.append(self._contribute_span(span, round_index))
                except (RoundError, NonFiniteUpdate):
                    continue
        self._steps_at[fragment] = made
        contribution = FragmentContribution(
            round=round_index, fragment=fragment, tokens=steps * TOKENS_PER_STEP, steps=steps, spans=tuple(spans)
        )
        return self.mischief(contribution) if self.mischief is not None else contribution

    # -- one span

    def _step(self, span: SpanId, steps: int) -> None:
        local_N, noise = self.local[span], self._noise
        size = STEP_SIZE * steps**0.5 * (8.0 if noise.random() < 0.05 else 1.0)
        pull = min(PULL * steps, 0.5)
        moved_N = np.array([noise.uniform(-size, size) for _ in range(len(local_N))]) - pull * local_N
        after_N = (local_N + moved_N).astype(np.float32)
        self._ledgers[span].make(after_N.astype(np.float64) - local_N)
        self.local[span] = after_N

    def _contribute_span(self, span: SpanId, round_index: int) -> EncodedSpan:
        maths, codec = self._maths, self._maths.codecs.contribution
        held = self._held(span)
        prepared = prepare_contribution(held, round_index=round_index)
        prepared, payload = encode_contribution(codec, prepared, lambda encoded: maths.norm(codec, encoded))
        decoded_N = maths.decode(codec, payload)
        self._keep(span, record_contribution(held, round_index=round_index, sent=decoded_N))
        self._sent(span, prepared, round_index, decoded_N)
        return EncodedSpan(span=span, parent=held.state.head.digest, norm=prepared.norm, payload=payload)

    def _held(self, span: SpanId) -> IslandSpan:
        return IslandSpan(self.states[span], self.in_flight.get(span, NOTHING_IN_FLIGHT), self.local[span])

    def _keep(self, span: SpanId, held: IslandSpan) -> None:
        self.states[span], self.in_flight[span], self.local[span] = held

    # -- the ledger

    def _sent(self, span: SpanId, prepared: PreparedContribution, round_index: int, decoded_N: Vector) -> None:
        """Check that what was sent is what was made, up to the codec's error and what was clipped."""
        ledger = self._ledgers[span]
        wrong = ledger.send(round_index, decoded_N) or ledger.resolve(self.in_flight[span], None)
        if wrong is not None:
            self._watch.complain("I2", f"{span}: {wrong}")
        self._balance(span)
        encoded = float(np.linalg.norm(prepared.delta_N))
        error = float(np.linalg.norm(prepared.delta_N - decoded_N)) + max(prepared.norm - encoded, 0.0)
        unsent = ledger.unsent()
        if unsent > 1.001 * error + ledger.slack:
            left = f"{unsent:.4g} of what was made is not sent"
            self._watch.complain("I2", f"{span}, round {round_index}: {left}; the codec explains {error:.4g}")

    def _resolved(self, span: SpanId, before: SpanState, entry_round: int | None) -> None:
        ledger = self._ledgers[span]
        ledger.follow(self.states[span].anchor_N - before.anchor_N)
        wrong = ledger.resolve(self.in_flight[span], entry_round)
        if wrong is not None:
            self._watch.complain("I2", f"{span}: {wrong}")
        self._balance(span)

    def _balance(self, span: SpanId) -> None:
        imbalance = self._ledgers[span].imbalance(self.states[span].anchor_N, self.local[span], self.in_flight[span])
        if not imbalance <= 1.0:
            text = f"{span}: the residual differs from the ledger by {imbalance:.3g} times what rounding explains"
            self._watch.complain("I2", text)
