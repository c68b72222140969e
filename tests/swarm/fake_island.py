"""An island without a model: θ is a vector in a bowl, inner steps are noisy descent on the loop's timers.

It treats φ, m and what is in flight exactly as the training thread does, with the same functions of `outer/`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.advance import (
    SpanAdvance,
    advance_span,
    prepare_contribution,
    record_contribution,
    replace_span,
    shrink_contribution,
)
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.merge import MergeRule
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution
from p2p_diloco.swarm.replica import Answer, SpanUpdate
from p2p_diloco.swarm.vector_work import Codecs

SPAN_ELEMENTS = 64
CODECS = Codecs(
    contribution=codec_named("int4"),
    row_mean=codec_named("int8"),
    entry=codec_named("int4"),
    rounds_stochastically=False,
)
OUTER = OuterRule(learning_rate=1.0, momentum=0.5)
MERGE = MergeRule(kind="keep", alpha=0.0, late="drop")
INNER_RATE = 0.02
GRADIENT_NOISE = 0.3
TOKENS_PER_STEP = 100
MOST_SHRINKS = 16  # spans of one block: the fewer numbers, the more their rounding sways a norm


def optimum(span: SpanId) -> Vector:
    """Return where the bowl is deepest."""
    return np.random.Generator(np.random.Philox(key=span.fragment * 1000 + span.index)).standard_normal(
        SPAN_ELEMENTS, dtype=np.float32
    )


class _Snapshot(NamedTuple):
    round: int
    fragment: int
    deadline: float
    answer: Answer
    spans: frozenset[SpanId] | None


class _Replacement(NamedTuple):
    span: SpanId
    state: SpanState


@dataclass(slots=True)
class _Since:
    steps: int = 0


Mischief = Callable[[FragmentContribution], FragmentContribution]


class FakeIsland:
    """A `Replica` for the swarm.

    Args:
        spans: all spans of the run.
        now: swarm seconds.
        seed: of the gradient's noise.
        step_seconds: how long an inner step takes.
        trains: False for a peer that only holds what others agree on.
        loop: whose timers make its steps; the running one unless given.
    """

    def __init__(
        self,
        *,
        spans: tuple[SpanId, ...],
        now: Callable[[], float],
        seed: int,
        step_seconds: float,
        trains: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.mischief: Mischief | None = None
        self.states: dict[SpanId, SpanState] = {}
        self.local_SN: Vector | None = None
        """θ, one row per span; None until all spans are there."""
        self.in_flight: dict[SpanId, InFlight] = {}
        self.steps = 0
        self._spans = spans
        self._row = {span: row for row, span in enumerate(spans)}
        self._optimum_SN = np.stack([optimum(span) for span in spans])
        self._now = now
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._step_seconds = step_seconds
        self._trains = trains
        self._since: dict[int, _Since] = {}
        self._commands: deque[SpanUpdate | _Replacement | _Snapshot] = deque()
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._timer = self._loop.call_later(step_seconds, self._reach_border)

    def stop(self) -> None:
        """End as a killed process does."""
        self._timer.cancel()

    def drop(self) -> None:
        """Hold nothing any more."""
        self.states = {}

    # -- the replica

    def span_state(self, span: SpanId) -> SpanState | None:
        return self.states.get(span)

    def apply(self, update: SpanUpdate) -> None:
        self._commands.append(update)

    def replace(self, span: SpanId, state: SpanState) -> None:
        self._commands.append(_Replacement(span, state))

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        self._commands.append(_Snapshot(round_index, fragment, deadline, answer, spans))

    def progress(self) -> Progress:
        return Progress(tokens=self.steps * TOKENS_PER_STEP, steps=self.steps)

    # -- step by step

    def settle(self) -> None:
        """Do at once what was handed over."""
        while self._commands:
            self._do(self._commands.popleft())

    def _reach_border(self) -> None:
        self._timer = self._loop.call_later(self._step_seconds, self._reach_border)
        self.settle()
        if self._trains and self._load_local():
            self._step()

    def _load_local(self) -> bool:
        if self.local_SN is None and len(self.states) == len(self._spans):
            self.local_SN = np.stack([self.states[span].anchor_N for span in self._spans])
        return self.local_SN is not None

    def _step(self) -> None:
        assert self.local_SN is not None
        self.steps += 1
        noise_SN = self._random.standard_normal(self.local_SN.shape, dtype=np.float32)
        self.local_SN -= INNER_RATE * (self.local_SN - self._optimum_SN + GRADIENT_NOISE * noise_SN)

    def _do(self, command: SpanUpdate | _Replacement | _Snapshot) -> None:
        match command:
            case SpanUpdate():
                self._absorb(command)
            case _Replacement():
                self._take(command)
            case _Snapshot():
                command.answer(self._contribute(command))

    def _absorb(self, update: SpanUpdate) -> None:
        span = update.span
        if span not in self.states and not self._trains:
            return
        state = self.states[span]
        update_N = CODECS.entry.decode(update.payload, SPAN_ELEMENTS)
        if self.local_SN is None:
            self.states[span] = absorb(state, entry=update.absorbed, update_N=update_N, rule=OUTER)
            return
        advance = advance_span(
            state,
            self.in_flight.get(span, InFlight()),
            self._local(span),
            entry=update.absorbed,
            update_N=update_N,
            own_included=update.own_included,
            outer_rule=OUTER,
            merge_rule=MERGE,
        )
        self._keep(span, advance)

    def _take(self, command: _Replacement) -> None:
        span = command.span
        if self.local_SN is None:
            self.states[span] = command.state
            return
        in_flight = self.in_flight.get(span, InFlight())
        self._keep(
            span,
            replace_span(self.states[span], in_flight, self._local(span), replacement=command.state, merge_rule=MERGE),
        )

    def _local(self, span: SpanId) -> Vector:
        assert self.local_SN is not None
        local_N: Vector = self.local_SN[self._row[span]]
        return local_N

    def _keep(self, span: SpanId, advance: SpanAdvance) -> None:
        self.states[span], self.in_flight[span], local_N = advance
        self._local(span)[:] = local_N

    def _contribute(self, command: _Snapshot) -> FragmentContribution | None:
        since = self._since.setdefault(command.fragment, _Since())
        steps = self.steps - since.steps
        if self._now() > command.deadline or steps == 0 or self.local_SN is None:
            return None
        spans = []
        for span in self._spans:
            if span.fragment != command.fragment or (command.spans is not None and span not in command.spans):
                continue
            try:
                spans.append(self._contribute_span(span, command.round))
            except (RoundError, NonFiniteUpdate):
                continue
        since.steps = self.steps
        contribution = FragmentContribution(
            round=command.round,
            fragment=command.fragment,
            tokens=steps * TOKENS_PER_STEP,
            steps=steps,
            spans=tuple(spans),
        )
        return self.mischief(contribution) if self.mischief is not None else contribution

    def _contribute_span(self, span: SpanId, round_index: int) -> EncodedSpan:
        codec, state = CODECS.contribution, self.states[span]
        in_flight = self.in_flight.get(span, InFlight())
        prepared = prepare_contribution(state, in_flight, self._local(span), round_index=round_index)
        payload = codec.encode(prepared.delta_N)
        for _ in range(MOST_SHRINKS):
            shrunk = shrink_contribution(prepared, codec.squared_norm(payload, SPAN_ELEMENTS) ** 0.5)
            if shrunk is prepared:
                break
            prepared = shrunk
            payload = codec.encode(prepared.delta_N)
        decoded_N = codec.decode(payload, SPAN_ELEMENTS)
        self._keep(
            span,
            record_contribution(state, in_flight, self._local(span), round_index=round_index, sent=decoded_N),
        )
        return EncodedSpan(span=span, parent=state.head.digest, norm=prepared.norm, payload=payload)


OPTIMA = {SpanId(fragment, index): optimum(SpanId(fragment, index)) for fragment in range(4) for index in range(16)}
