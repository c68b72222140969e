"""The agreed state of a peer that trains, and how θ follows it without waiting for it.

φ and m follow entries on a thread of their own, while a step is made. What θ is to become then waits, span by span,
and the thread that trains brings it about at its next step border: θ ← scale · θ + offset, where a merge that keeps
has scale 1. So entries are followed, served and stored also while nobody steps, and θ belongs to one thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple

import numpy as np

from p2p_diloco.errors import NonFiniteUpdate, RoundError, StateError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.kernels.choice import frozen
from p2p_diloco.memory.slabs import passing_vector
from p2p_diloco.outer.advance import replace_span
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.peer.held_state import HeldState
from p2p_diloco.peer.local_spans import LocalSpans
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution
from p2p_diloco.span.replica import Answer, SpanDamaged, SpanUpdate
from p2p_diloco.span.span_work import follow_span
from p2p_diloco.storage.diary import Diary
from p2p_diloco.storage.inner_state import InnerState
from p2p_diloco.training.evaluation import Slice

IDLE_SECONDS = 0.05
LOSS_SMOOTHING = 0.95
RATE_WINDOW_SECONDS = 30.0
"""The window over which tokens per second are counted."""


_NOTHING_IN_FLIGHT = InFlight()


class Absorbed(NamedTuple):
    """An entry that θ follows, for the diary."""

    entry: Digest
    own_included: bool


class Took(NamedTuple):
    """A span that was replaced, for the diary."""

    head: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """What lies between a span's agreed state and θ.

    Attributes:
        in_flight: contributions without their entries.
        scale, offset_N: θ is to become scale · θ + offset; no offset: it is where it should be.
        events: what that is made of.
    """

    in_flight: InFlight = _NOTHING_IN_FLIGHT
    scale: float = 1.0
    offset_N: Vector | None = None
    events: tuple[Absorbed | Took, ...] = ()


class _Request(NamedTuple):
    """A contribution that a round waits for."""

    round: int
    fragment: int
    deadline: float
    answer: Answer
    spans: frozenset[SpanId] | None


class _Look(NamedTuple):
    slices: Sequence[Slice]
    hand_over: Callable[[tuple[Vector, ...]], None]


@dataclass(slots=True)
class _Counts:
    """Tokens and steps of this peer, in all or when a fragment was last contributed."""

    tokens: int = 0
    steps: int = 0


class TrainedState(HeldState):
    """A `Replica` with a model that somebody trains.

    One thread trains. It calls `begin` until the model holds φ, then `stepped` and `border` after each of its steps.

    Args:
        local: θ, span by span.
        now: swarm seconds, callable from any thread.
        wake: called, from any thread, when there is something to do at a border.
        diary: of all that happens to θ.
        inner: what the thread that trains keeps for itself.
        hear: told, in the loop, what could not be kept or taken up again; `(topic, text)`.
    """

    def __init__(
        self,
        plan: RunPlan,
        local: LocalSpans,
        *,
        now: Callable[[], float],
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
        damaged: SpanDamaged,
        wake: Callable[[], None] = lambda: None,
        diary: Diary | None = None,
        inner: InnerState | None = None,
        hear: Callable[[str, str], None] = lambda topic, text: None,
    ) -> None:
        super().__init__(plan, in_loop=in_loop, died=died, damaged=damaged)
        self.local = local
        self.wake = wake
        self.counts = _Counts()
        self._now = now
        self._diary = diary
        self._inner = inner
        self._hear = hear
        self._keeps_inner = False
        self._is_loaded = False
        self._lately: deque[tuple[float, int]] = deque()
        self._stepped_at = time.monotonic()
        self._loss = 0.0
        self._progress = Progress()
        self._contributed = [_Counts() for _ in plan.fragments]
        self._locals: dict[SpanId, _Local] = {}
        self._locks = {span: Lock() for span in plan.places}
        self._moved: deque[SpanId] = deque()
        self._requests: deque[_Request] = deque()
        self._looks: deque[_Look] = deque()
        # Zeros below zero: whatever is added to one is what comes of it, to the bit.
        longest = max(place.stop - place.start for place in plan.places.values())
        self._nothing = frozen(np.full(longest, -0.0, np.float32))

    # -- for the event loop

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Contribute at the next step border."""
        while self._requests and self._requests[0].deadline < self._now():
            self._requests.popleft().answer(None)  # nobody steps
        self._requests.append(_Request(round_index, fragment, deadline, answer, spans))
        self.wake()

    def look(self, slices: Sequence[Slice], hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        """Hand a copy of these slices of θ, as they are at the next step border, to `hand_over`, in the loop."""
        self._looks.append(_Look(slices, hand_over))
        self.wake()

    def keep_inner(self) -> None:
        """Keep what the thread that trains has for itself at the next step border."""
        self._keeps_inner = self._inner is not None
        self.wake()

    def progress(self) -> Progress:
        """Return what heartbeats publish of this peer's training."""
        return self._progress

    def seconds_since_step(self) -> float:
        """Return for how long no step has been counted."""
        return time.monotonic() - self._stepped_at

    # -- for the thread that trains

    @property
    def fraction(self) -> float:
        """How far the run is, 0 to 1: entries that the state holds over those that are planned, not wall time."""
        heights = sum(state.head.height for state in self._states.values())
        planned = self._plan.manifest.rounds.planned_cycles * max(1, len(self._states))
        return min(1.0, heights / planned)

    def begin(self) -> bool:
        """Begin with θ := φ once all spans are there; return whether they are."""
        if not self._is_loaded and len(self._states) == len(self._plan.places):
            heads = {}
            for span, lock in self._locks.items():
                with lock:
                    self.local.write(span, self._states[span].anchor_N)
                    self._locals[span] = _Local()
                    heads[span] = self._states[span].head.digest
            self._is_loaded = True
            kept = self._load_inner()
            self._stepped_at = time.monotonic()
            if self._diary is not None:
                self._diary.loaded(heads, kept)
        return self._is_loaded

    def stepped(self, tokens: int, loss: float | None = None) -> None:
        """Count a step of the optimiser, which trained on so many tokens since the last one."""
        moment = time.monotonic()
        self._stepped_at = moment
        if loss is not None:
            is_first = self.counts.steps == 0
            self._loss = loss if is_first else LOSS_SMOOTHING * self._loss + (1 - LOSS_SMOOTHING) * loss
        self.counts.tokens += tokens
        self.counts.steps += 1
        self._progress = Progress(
            tokens=self.counts.tokens,
            steps=self.counts.steps,
            tokens_per_second=self._tokens_per_second(moment),
            loss=self._loss,
        )

    def _tokens_per_second(self, moment: float) -> float:
        self._lately.append((moment, self.counts.tokens))
        while len(self._lately) > 1 and self._lately[1][0] <= moment - RATE_WINDOW_SECONDS:
            self._lately.popleft()
        began, before = self._lately[0]
        return (self.counts.tokens - before) / max(moment - began, 1e-3)

    def border(self) -> None:
        """Let θ follow what was followed meanwhile, and contribute what is due; between two steps."""
        for _ in range(len(self._moved)):
            span = self._moved.popleft()
            lock = self._locks[span]
            if not lock.acquire(blocking=False):  # it is followed just now; no reason to wait
                self._moved.append(span)
                continue
            try:
                self._settle(span)
            finally:
                lock.release()
        while self._requests:
            self._answer(self._requests.popleft())
        while self._looks:
            slices, hand_over = self._looks.popleft()
            self._in_loop(_call(hand_over, self._copies(slices)))
        if self._keeps_inner:
            self.save_inner()

    def save_inner(self) -> None:
        """Keep now what this thread has for itself."""
        self._keeps_inner = False
        if self._inner is None or not self._is_loaded:
            return
        label = f"{time.time():.6f}"
        if self._diary is not None:
            self._diary.kept(self.counts.steps, label)
        try:
            self._inner.save(label)
        except StateError as error:
            self._report("inner", str(error))

    def _load_inner(self) -> str | None:
        try:
            return self._inner.load() if self._inner is not None else None
        except StateError as error:
            self._report("inner", str(error))
            return None

    def _report(self, topic: str, text: str) -> None:
        self._in_loop(lambda: self._hear(topic, text))

    def in_flight(self, span: SpanId) -> InFlight:
        """Return a span's contributions without their entries."""
        return self._locals[span].in_flight if span in self._locals else _NOTHING_IN_FLIGHT

    @property
    def has_work(self) -> bool:
        """Whether a border would do anything."""
        return bool(self._moved or self._requests or self._looks or self._keeps_inner)

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None = None
    ) -> FragmentContribution | None:
        """Contribute a fragment to a round, or the `chosen` spans of it; None when there is nothing new."""
        before = self._contributed[fragment]
        tokens, steps = self.counts.tokens - before.tokens, self.counts.steps - before.steps
        if steps == 0 or not self._is_loaded:
            return None
        spans = []
        for span in self._plan.spans_of(fragment):
            if (chosen is not None and span not in chosen) or span in self._damaged_spans:
                continue
            try:
                with self._locks[span]:
                    self._settle(span)
                    spans.append(self._contribute_span(span, round_index))
            except (RoundError, NonFiniteUpdate):
                continue
        before.tokens, before.steps = self.counts.tokens, self.counts.steps
        if self._diary is not None:
            self._diary.contributed(self.counts.steps, round_index, fragment, chosen)
        return FragmentContribution(
            round=round_index, fragment=fragment, tokens=tokens, steps=steps, spans=tuple(spans)
        )

    def _answer(self, request: _Request) -> None:
        contribution = None
        if self._now() <= request.deadline:
            contribution = self.contribute(request.round, request.fragment, request.spans)
        self._in_loop(lambda: request.answer(contribution))

    def _contribute_span(self, span: SpanId, round_index: int) -> EncodedSpan:
        state, held = self._states[span], self._locals[span]
        sent = self.local.contribute(span, state, held.in_flight, round_index)
        self._locals[span] = replace(held, in_flight=sent.advance.in_flight)
        return EncodedSpan(span=span, parent=state.head.digest, norm=sent.norm, payload=sent.payload)

    def _settle(self, span: SpanId) -> None:
        """Let θ become what it is to be."""
        held = self._locals[span]
        if held.offset_N is None:
            return
        self.local.move(span, held.scale, held.offset_N)
        self._locals[span] = _Local(in_flight=held.in_flight)
        if self._diary is not None:
            for event in held.events:
                if isinstance(event, Absorbed):
                    self._diary.absorbed(self.counts.steps, span, event.entry, event.own_included)
                else:
                    self._diary.took(self.counts.steps, span, event.head)

    def _copies(self, slices: Sequence[Slice]) -> tuple[Vector, ...]:
        """Return a copy of these slices of θ; not on the heap, where it would take the place of a gradient."""
        copies = tuple(passing_vector(stop - start) for _, start, stop in slices)
        for copy_N, (fragment, start, stop) in zip(copies, slices, strict=True):
            np.copyto(copy_N, self.local.parameters.view(fragment, start, stop))
        return copies

    # -- on the thread that follows

    def _advance(self, held: dict[SpanId, SpanState], state: SpanState, update: SpanUpdate) -> None:
        span, plan = update.span, self._plan
        with self._locks[span]:
            local = self._locals.get(span)
            if local is None:
                super()._advance(held, state, update)
                return
            advance = follow_span(
                state,
                local.in_flight,
                self._offset(span, local),
                entry=update.absorbed,
                payload=update.payload,
                own_included=update.own_included,
                codecs=plan.codecs,
                outer_rule=plan.outer,
                merge_rule=plan.merge,
            )
            held[span] = advance.state
            event = Absorbed(update.absorbed.digest, update.own_included)
            self._owe(span, local, advance.in_flight, advance.local_N, event)

    def _put(self, held: dict[SpanId, SpanState], span: SpanId, state: SpanState) -> None:
        with self._locks[span]:
            local, event = self._locals.get(span), Took(state.head.digest)
            if local is not None and span in self._damaged_spans:
                # What θ would follow from is damaged, so it begins again at the anchor.
                events = (*local.events, event) if self._diary is not None else ()
                self._locals[span] = _Local(scale=0.0, offset_N=state.anchor_N, events=events)
                self._moved.append(span)
            elif local is not None:
                offset_N, rule = self._offset(span, local), self._plan.merge
                advance = replace_span(held[span], local.in_flight, offset_N, replacement=state, merge_rule=rule)
                self._owe(span, local, advance.in_flight, advance.local_N, event)
            super()._put(held, span, state)
        self.wake()

    def _offset(self, span: SpanId, local: _Local) -> Vector:
        place = self._plan.places[span]
        return local.offset_N if local.offset_N is not None else self._nothing[: place.stop - place.start]

    def _owe(self, span: SpanId, local: _Local, in_flight: InFlight, offset_N: Vector, event: Absorbed | Took) -> None:
        self._locals[span] = _Local(
            in_flight=in_flight,
            scale=local.scale * self._plan.merge.in_flight_share,
            offset_N=offset_N,
            events=(*local.events, event) if self._diary is not None else (),
        )
        if local.offset_N is None:
            self._moved.append(span)
        self.wake()


def _call(hand_over: Callable[[tuple[Vector, ...]], None], copies: tuple[Vector, ...]) -> Callable[[], None]:
    return lambda: hand_over(copies)
