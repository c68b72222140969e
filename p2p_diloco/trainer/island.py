"""One island: θ, what it has in flight, its copy of φ and m, and what each event of the swarm does to them.

Knows no thread and no clock: the training thread plays it in a swarm, a twin plays it again from a diary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import BatchStream
from p2p_diloco.island.evaluation import Slice
from p2p_diloco.island.inner_loop import InnerLoop, InnerStep
from p2p_diloco.island.model import DecoderModel
from p2p_diloco.island.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.kernels.slabs import passing_vector
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.diary import Diary
from p2p_diloco.trainer.local_spans import SpansOf, spans_for
from p2p_diloco.trainer.run_plan import RunPlan


@dataclass(slots=True)
class _Since:
    """Tokens and steps of an island when a fragment was last contributed."""

    tokens: int = 0
    steps: int = 0


class Island:
    """What an island is between two steps. One thread calls it.

    Args:
        device: where it trains.
        diary: of all that happens to it.
        spans_of: how it reaches the spans of θ; None: as suits the device.
    Attributes:
        states: spans as agreed; may be read by others, for they are frozen.
    """

    def __init__(
        self,
        *,
        plan: RunPlan,
        model: DecoderModel,
        stream: BatchStream,
        device: torch.device,
        diary: Diary | None = None,
        spans_of: SpansOf | None = None,
    ) -> None:
        self.states: dict[SpanId, SpanState] = {}
        self.loop = InnerLoop(model, stream, plan.inner, device)
        lay_end_to_end(model, plan.fragments)
        self.parameters = LocalParameters(model, plan.fragments)
        self._spans = (spans_of or spans_for(plan, self.loop.device))(plan, self.parameters)
        self._plan = plan
        self._diary = diary
        self._in_flight: dict[SpanId, InFlight] = {}
        self._since = [_Since() for _ in plan.fragments]
        self._is_loaded = False
        self._heights = 0
        if diary is not None:
            diary.began(stream.position)

    def load(self) -> bool:
        """Begin with θ := φ once all spans are there; tell whether they are."""
        if not self._is_loaded and len(self.states) == len(self._plan.places):
            for span, place in self._plan.places.items():
                self.parameters.write(span.fragment, place.start, place.stop, self.states[span].anchor_N)
            self._is_loaded = True
            self._follow_schedule()
            if self._diary is not None:
                self._diary.loaded({span: state.head.digest for span, state in self.states.items()})
        return self._is_loaded

    def step(self) -> InnerStep:
        """Make one inner step."""
        return self.loop.step()

    def absorb(self, update: SpanUpdate) -> None:
        """Follow an entry: outer step, then merge."""
        span, plan, state = update.span, self._plan, self.states[update.span]
        if not self._is_loaded:
            update_N = plan.codecs.entry.decode(update.payload, state.elements)
            self._hold(span, absorb(state, entry=update.absorbed, update_N=update_N, rule=plan.outer))
            return
        in_flight = self._in_flight.get(span, InFlight())
        self._hold(span, *self._spans.follow(state, in_flight, update))
        self._follow_schedule()
        if self._diary is not None:
            self._diary.absorbed(self.loop.steps, span, update.absorbed.digest, update.own_included)

    def take(self, span: SpanId, state: SpanState, *, anew: bool = False) -> None:
        """Take a span as it was transferred or mended.

        Args:
            anew: let θ begin again there, because what it would follow from is damaged.
        """
        if not self._is_loaded:
            self._hold(span, state)
            return
        if anew:
            place = self._plan.places[span]
            self._hold(span, state, InFlight())
            self.parameters.write(span.fragment, place.start, place.stop, state.anchor_N)
        else:
            in_flight = self._in_flight.get(span, InFlight())
            self._hold(span, *self._spans.replace(span, self.states[span], in_flight, state))
        self._follow_schedule()
        if self._diary is not None:
            self._diary.took(self.loop.steps, span, state.head.digest)

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None = None
    ) -> FragmentContribution | None:
        """Contribute a fragment to a round, or the `chosen` spans of it; None when there is nothing new."""
        since = self._since[fragment]
        tokens, steps = self.loop.tokens - since.tokens, self.loop.steps - since.steps
        if steps == 0 or not self._is_loaded:
            return None
        spans = []
        for span in self._plan.spans_of(fragment):
            if chosen is not None and span not in chosen:
                continue
            try:
                spans.append(self._contribute_span(span, round_index))
            except (RoundError, NonFiniteUpdate):
                continue
        since.tokens, since.steps = self.loop.tokens, self.loop.steps
        if self._diary is not None:
            self._diary.contributed(self.loop.steps, round_index, fragment, chosen)
        return FragmentContribution(
            round=round_index, fragment=fragment, tokens=tokens, steps=steps, spans=tuple(spans)
        )

    def look(self, slices: Sequence[Slice]) -> tuple[Vector, ...]:
        """Return a copy of these slices of θ; not on the heap, where it would take the place of a gradient."""
        copies = tuple(passing_vector(stop - start) for _, start, stop in slices)
        for copy_N, (fragment, start, stop) in zip(copies, slices, strict=True):
            np.copyto(copy_N, self.parameters.view(fragment, start, stop))
        return copies

    def _hold(self, span: SpanId, state: SpanState, in_flight: InFlight | None = None) -> None:
        before = self.states.get(span)
        self._heights += state.head.height - (before.head.height if before is not None else 0)
        self.states[span] = state
        if in_flight is not None:
            self._in_flight[span] = in_flight

    def _follow_schedule(self) -> None:
        """Let the inner rate be the one of where the run stands: not of how long this island has taken part."""
        self.loop.set_progress(self._heights / len(self.states) / self._plan.manifest.rounds.planned_cycles)

    def _contribute_span(self, span: SpanId, round_index: int) -> EncodedSpan:
        state = self.states[span]
        sent = self._spans.contribute(span, state, self._in_flight.get(span, InFlight()), round_index)
        self._in_flight[span] = sent.advance.in_flight
        return EncodedSpan(span=span, parent=state.head.digest, norm=sent.norm, payload=sent.payload)
