"""The agreed state of a run at one peer: spans, to which a separate thread applies entries.

Neither the event loop nor training processes whole vectors for this. A peer without a model, such as a bootstrap while
it is a member, uses `HeldState`; `TrainedState` adds the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import SpanId
from p2p_diloco.memory.slabs import passing_vector
from p2p_diloco.node.ports import MEMORY_ERRORS, Answer, SpanDamaged, SpanUpdate
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.span.known_answer import check_known_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHost:
    """The run and the peer of a state.

    Attributes:
        plan: plan of the run.
        now: returns swarm seconds; callable from any thread.
        in_loop: schedules a call in the event loop.
        died: called in the loop with an error that ends the work of a thread.
        damaged: called in the loop with a span that must be replaced because its memory is damaged.
        report: called in the loop with the topic and the text of an event.
    """

    plan: RunPlan
    now: Callable[[], float]
    in_loop: Callable[[Callable[[], None]], None]
    died: Callable[[BaseException], None]
    damaged: SpanDamaged
    report: Callable[[str, str], None] = lambda topic, text: None

    def report_soon(self, topic: str, text: str) -> None:
        """Report an event from any thread."""
        self.in_loop(lambda: self.report(topic, text))


class HeldState:
    """A `Replica` without a model."""

    def __init__(self, host: StateHost) -> None:
        self.host = host
        self._plan = host.plan
        self._has_checked = False
        self._damaged_spans: set[SpanId] = set()
        self._states: dict[SpanId, SpanState] = {}
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="follower")

    def hold(self, states: Mapping[SpanId, SpanState]) -> None:
        """Set the spans; call this before the first entry."""
        self._states = dict(states)
        self._damaged_spans.clear()

    def drop(self) -> None:
        self._states = {}

    def close(self) -> None:
        self._follower.shutdown(wait=False, cancel_futures=True)

    def wait_until_idle(self) -> None:
        """Wait until all submitted work is done; blocks."""
        self._follower.submit(lambda: None).result()

    # -- for the event loop

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span, or None if it is not held or damaged."""
        return self._states.get(span) if span not in self._damaged_spans else None

    def states(self) -> dict[SpanId, SpanState]:
        return dict(self._states)

    def moving_states(self) -> Mapping[SpanId, SpanState]:
        """Return a live view of the spans, which keeps no replaced span alive.

        Empty while a span is damaged, so that no checkpoint is made of it.
        """
        return MappingProxyType(self._states if not self._damaged_spans else {})

    def apply(self, update: SpanUpdate) -> None:
        """Schedule applying an entry to its span."""
        self._soon(lambda: self._follow(update))

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Schedule replacing a span by a transferred one, before updates submitted later."""
        held = self._states
        self._soon(lambda: self._put(held, span, state))

    def request_contribution(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Answer with None: there is nothing to contribute."""
        answer(None)

    def progress(self) -> Progress:
        return Progress()

    # -- on the follower thread

    def _follow(self, update: SpanUpdate) -> None:
        """Apply an entry; a span with damaged memory is left unchanged and ignored until it is replaced."""
        held = self._states
        state = held.get(update.span)
        if state is None or update.span in self._damaged_spans:
            return  # dropped meanwhile, or about to be replaced by a later state
        try:
            self._advance(held, state, update)
        except MEMORY_ERRORS as error:
            reason = str(error)
            self._damaged_spans.add(update.span)
            self.host.in_loop(lambda: self.host.damaged(update.span, reason))

    def _advance(self, held: dict[SpanId, SpanState], state: SpanState, update: SpanUpdate) -> None:
        update_N = self._plan.codecs.entry.decode(update.payload, state.elements)
        held[update.span] = absorb(state, entry=update.absorbed, update_N=update_N, rule=self._plan.outer)

    def _put(self, held: dict[SpanId, SpanState], span: SpanId, state: SpanState) -> None:
        held[span] = state
        self._damaged_spans.discard(span)

    def _soon(self, work: Callable[[], None]) -> None:
        if not self._has_checked:
            self._has_checked = True
            self._follower.submit(check_known_answer).add_done_callback(self._note_failure)
        self._follower.submit(work).add_done_callback(self._note_failure)

    def _note_failure(self, done: Future[None]) -> None:
        failure = None if done.cancelled() else done.exception()
        if failure is not None:
            self.host.in_loop(lambda: self.host.died(failure))


class Slice(NamedTuple):
    """Elements `start` to `stop` of a fragment."""

    fragment: int
    start: int
    stop: int


def anchor_slice(plan: RunPlan, states: Mapping[SpanId, SpanState], wanted: Slice) -> Vector:
    """Return a copy of a slice of a fragment of φ; allocated outside the heap, so as not to displace a gradient."""
    pieces = []
    for span in plan.spans_of(wanted.fragment):
        place = plan.places[span]
        start, stop = max(place.start, wanted.start), min(place.stop, wanted.stop)
        if start < stop:
            pieces.append(states[span].anchor_N[start - place.start : stop - place.start])
    return np.concatenate(pieces, out=passing_vector(sum(map(len, pieces))))
