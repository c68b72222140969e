"""A tiny island: real anchor, momentum, in-flight list, codec and merge; inner steps are random displacements.

It treats φ, m, θ and what is in flight as the training thread does, with the same functions of `outer/`. Only the
absorbed state comes from `SharedMaths`, which computes it once for all peers that hold the same bytes.

Legend: N = elements of one span.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.ids import SpanId
from p2p_diloco.kernels.bounds import LARGEST_ANCHOR
from p2p_diloco.lab.ledger import Ledger
from p2p_diloco.lab.maths import MERGE, SharedMaths
from p2p_diloco.outer.advance import (
    PreparedContribution,
    SpanAdvance,
    follow_entry,
    prepare_contribution,
    record_contribution,
    replace_span,
)
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.state import SpanState, is_sound
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.actions import TakeSnapshot
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution
from p2p_diloco.swarm.vector_work import encode_contribution

TOKENS_PER_STEP = 100
STEP_SIZE = 0.02
PULL = 0.01
NOTHING_IN_FLIGHT = InFlight()


class Complaint(NamedTuple):
    """What the books say is wrong: the invariant's name and a sentence."""

    invariant: str
    text: str


class Replacement(NamedTuple):
    """A transferred span on its way to the island."""

    span: SpanId
    state: SpanState


class Update(NamedTuple):
    """An entry on its way to the island."""

    entry: Entry
    own_included: bool


Command = Update | Replacement | TakeSnapshot


class Island:
    """One peer's vectors; nothing here waits for anything.

    Args:
        maths: shared by the whole swarm.
        spans: all spans of the run.
        noise: draws the inner steps.
        trains: False for a peer that only holds what others agree on.
        complain: told what the books say is wrong.
    """

    def __init__(
        self,
        *,
        maths: SharedMaths,
        spans: tuple[SpanId, ...],
        noise: random.Random,
        trains: bool,
        complain: Callable[[Complaint], None],
    ) -> None:
        self.states: dict[SpanId, SpanState] = {}
        self.local: dict[SpanId, Vector] = {}
        self.in_flight: dict[SpanId, InFlight] = {}
        self.commands: deque[Command] = deque()
        self._maths = maths
        self._spans = spans
        self._noise = noise
        self._trains = trains
        self._complain = complain
        self._ledgers: dict[SpanId, Ledger] = {}
        self._steps_at: dict[int, int] = {}

    def load(self) -> None:
        """Begin to train once all spans are there: θ := φ."""
        if self._trains and not self.local and len(self.states) == len(self._spans):
            self.local = {span: state.anchor_N.copy() for span, state in self.states.items()}
            self._ledgers = {span: Ledger(self._maths.span_elements) for span in self._spans}

    def drop(self) -> None:
        """Hold nothing any more."""
        self.states = {}

    # -- events

    def absorb(self, update: Update, advanced: SpanState) -> None:
        """Follow an entry: φ and m as `advanced` has them, θ and the list in flight by the merge rule."""
        span = update.entry.span
        before = self.states[span]
        if not self.local:
            self.states[span] = advanced
            return
        if self._noise.random() < 0.3:
            self._step(span, 1)  # made since the snapshot: stays in θ
        in_flight = self.in_flight.get(span, NOTHING_IN_FLIGHT)
        self._keep(
            span,
            follow_entry(
                before,
                in_flight,
                self.local[span],
                advanced=advanced,
                own_included=update.own_included,
                merge_rule=MERGE,
            ),
        )
        self._resolved(span, before, update.entry.round)

    def replace(self, command: Replacement) -> None:
        """Take a span as transferred; all in flight counts as if included."""
        span, before = command.span, self.states.get(command.span)
        if not self.local or before is None:
            self.states[span] = command.state
            return
        in_flight = self.in_flight.get(span, NOTHING_IN_FLIGHT)
        self._keep(span, replace_span(before, in_flight, self.local[span], replacement=command.state, merge_rule=MERGE))
        self._resolved(span, before, None)

    def flip_bit(self, span: SpanId, place: int, bit: int) -> bool:
        """Flip one bit of φ, as bad memory does; False when that would make one that no state holds."""
        state = self.states[span]
        anchor_N = state.anchor_N.copy()
        anchor_N.view(np.uint32)[place] ^= np.uint32(1 << bit)
        moved_N = anchor_N.astype(np.float64) - state.anchor_N
        if not is_sound(anchor_N, largest=LARGEST_ANCHOR) or np.abs(moved_N).max() > 4.0:
            return False
        self.states[span] = SpanState(head=state.head, anchor_N=anchor_N, momentum_N=state.momentum_N)
        if span in self._ledgers:
            self._ledgers[span].flip(moved_N)
        return True

    def contribute(self, order: TakeSnapshot, steps_made: int) -> FragmentContribution | None:
        """Snapshot a fragment for a round.

        Args:
            steps_made: inner steps since this island started.
        """
        steps = steps_made - self._steps_at.get(order.fragment, 0)
        if steps <= 0 or not self.local:
            return None
        spans = []
        for span in self._spans:
            if span.fragment == order.fragment:
                self._step(span, steps)
                if order.spans is not None and span not in order.spans:
                    continue
                try:
                    spans.append(self._contribute_span(span, order.round))
                except (RoundError, NonFiniteUpdate):
                    continue
        self._steps_at[order.fragment] = steps_made
        return FragmentContribution(
            round=order.round,
            fragment=order.fragment,
            tokens=steps * TOKENS_PER_STEP,
            steps=steps,
            spans=tuple(spans),
        )

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
        state, local_N = self.states[span], self.local[span]
        in_flight = self.in_flight.get(span, NOTHING_IN_FLIGHT)
        prepared = prepare_contribution(state, in_flight, local_N, round_index=round_index)
        prepared, payload = encode_contribution(codec, prepared, lambda encoded: maths.norm(codec, encoded))
        decoded_N = maths.decode(codec, payload)
        advance = record_contribution(state, in_flight, local_N, round_index=round_index, sent=decoded_N)
        self._keep(span, advance)
        self._sent(span, prepared, round_index, decoded_N)
        return EncodedSpan(span=span, parent=state.head.digest, norm=prepared.norm, payload=payload)

    def _keep(self, span: SpanId, advance: SpanAdvance) -> None:
        self.states[span], self.in_flight[span], self.local[span] = advance

    # -- the books

    def _sent(self, span: SpanId, prepared: PreparedContribution, round_index: int, decoded_N: Vector) -> None:
        """Check that what was sent is what was made, up to the codec's error and what was clipped."""
        ledger = self._ledgers[span]
        wrong = ledger.send(round_index, decoded_N) or ledger.resolve(self.in_flight[span], None)
        if wrong is not None:
            self._complain(Complaint("I2", f"{span}: {wrong}"))
        self._balance(span)
        encoded = float(np.linalg.norm(prepared.delta_N))
        error = float(np.linalg.norm(prepared.delta_N - decoded_N)) + max(prepared.norm - encoded, 0.0)
        unsent = ledger.unsent()
        if unsent > 1.001 * error + ledger.slack:
            left = f"{unsent:.4g} of what was made is not sent"
            text = f"{span}, round {round_index}: {left}; the codec explains {error:.4g}"
            self._complain(Complaint("I2", text))

    def _resolved(self, span: SpanId, before: SpanState, entry_round: int | None) -> None:
        ledger = self._ledgers[span]
        ledger.follow(self.states[span].anchor_N - before.anchor_N)
        wrong = ledger.resolve(self.in_flight[span], entry_round)
        if wrong is not None:
            self._complain(Complaint("I2", f"{span}: {wrong}"))
        self._balance(span)

    def _balance(self, span: SpanId) -> None:
        imbalance = self._ledgers[span].imbalance(self.states[span].anchor_N, self.local[span], self.in_flight[span])
        if not imbalance <= 1.0:
            text = f"{span}: the residual is off the books by {imbalance:.3g} times what rounding explains"
            self._complain(Complaint("I2", text))
