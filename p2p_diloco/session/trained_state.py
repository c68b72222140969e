"""The agreed state of a peer that trains, and how updates reach θ without blocking training.

A separate thread applies entries to φ and m while a step runs. The resulting update of θ is queued span by span, and
the training thread applies it at its next step border: θ ← scale · θ + offset, where scale is 1 for a merge that keeps
local progress. So entries are applied, served and stored even without steps, and only one thread writes θ. Between the
end of a border and the next step of an optimiser θ stands still, so the separate thread may read it then to contribute.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from threading import Lock
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.vectors import Vector, read_only
from p2p_diloco.errors import ConfigError, NonFiniteUpdate, RoundError, StateError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.island.inner_state import InnerState
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.memory.slabs import passing_vector
from p2p_diloco.node.ports import Answer, SpanUpdate
from p2p_diloco.outer.state import InFlight, IslandSpan, Lengths, SpanState, Unsent, replace_span
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution
from p2p_diloco.session.held_state import HeldState, Slice, StateHost
from p2p_diloco.span.fused import follow_span
from p2p_diloco.storage.trace import Trace

IDLE_SECONDS = 0.05
MOST_UNDONE = 3
"""Steps undone within a cycle, or in a row, after which training ends."""
NOT_FINITE_REMEDY = "look at the learning rate, the batch and the precision"
LOSS_SMOOTHING = 0.95
RATE_WINDOW_SECONDS = 30.0
"""Window over which tokens per second are measured."""
LENGTH_CYCLES = 8
"""Cycles over which the lengths of contributions are summed up."""


_NOTHING_IN_FLIGHT, _NOTHING_UNSENT = InFlight(), Unsent()


class Absorbed(NamedTuple):
    """An entry applied to θ, for the trace."""

    entry: Digest
    own_included: bool


class Took(NamedTuple):
    """A replaced span, for the trace."""

    head: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """The pending difference between a span's agreed state and θ.

    Attributes:
        in_flight: contributions whose entries have not arrived.
        unsent: what the last contribution left in θ because it was clipped.
        scale, offset_N: θ must become scale · θ + offset; no offset: θ is up to date.
        events: the events that this update combines.
    """

    in_flight: InFlight = _NOTHING_IN_FLIGHT
    unsent: Unsent = _NOTHING_UNSENT
    scale: float = 1.0
    offset_N: Vector | None = None
    events: tuple[Absorbed | Took, ...] = ()


class _Request(NamedTuple):
    """A request for a contribution to a round."""

    round: int
    fragment: int
    deadline: float
    answer: Answer
    spans: frozenset[SpanId] | None


class _Look(NamedTuple):
    slices: Sequence[Slice]
    hand_over: Callable[[tuple[Vector, ...]], None]


class Counts(NamedTuple):
    """Tokens and steps of this peer: in total, or up to the last contribution of a fragment."""

    tokens: int = 0
    steps: int = 0


class StepMeter:
    """Counts steps, and measures their rate and loss. For the training thread; others may read the attributes.

    Attributes:
        counts: tokens and steps so far.
        progress: the training progress that heartbeats publish.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.progress = Progress()
        self._loss: float | None = None
        self._lately: deque[tuple[float, int]] = deque()
        self._stepped_at = time.monotonic()

    def begin(self) -> None:
        """Note that training begins, from which the time without a step counts."""
        self._stepped_at = time.monotonic()

    def count(self, tokens: int, steps: int = 1) -> None:
        self.counts = Counts(self.counts.tokens + tokens, self.counts.steps + steps)

    def stepped(self, tokens: int, loss: float | None = None) -> None:
        self._stepped_at = time.monotonic()
        if loss is not None and math.isfinite(loss):  # another would stay in the average for ever
            before = loss if self._loss is None else self._loss
            self._loss = LOSS_SMOOTHING * before + (1 - LOSS_SMOOTHING) * loss
        self.count(tokens)
        rate = self._tokens_per_second()
        self.progress = replace(self.progress, **self.counts._asdict(), tokens_per_second=rate, loss=self._loss or 0.0)

    def failed(self, why: str) -> None:
        self.progress = replace(self.progress, undone=self.progress.undone + 1, undone_why=why)

    def seconds_since_step(self) -> float:
        return time.monotonic() - self._stepped_at

    def _tokens_per_second(self) -> float:
        moment, tokens = self._stepped_at, self.counts.tokens
        self._lately.append((moment, tokens))
        while len(self._lately) > 1 and self._lately[1][0] <= moment - RATE_WINDOW_SECONDS:
            self._lately.popleft()
        began, before = self._lately[0]
        return (tokens - before) / max(moment - began, 1e-3)


class _Stillness:
    """Whether θ stands still: it does from the end of a border to the next step of an optimiser."""

    def __init__(self) -> None:
        self._lock = Lock()  # held while θ may change
        self._is_over = False

    def end(self) -> None:
        """Wait until no contribution is read from θ; the training thread may then change it."""
        if not self._is_over:
            self._lock.acquire()
            self._is_over = True

    def begin(self) -> None:
        """Let θ be read, at the end of a border."""
        self._is_over = False
        self._lock.release()

    @contextmanager
    def if_still(self) -> Iterator[bool]:
        """Yield whether θ stands still, which it then does until the end of the block."""
        is_still = self._lock.acquire(blocking=False)
        try:
            yield is_still
        finally:
            if is_still:
                self._lock.release()


class TrainedState(HeldState):
    """A `Replica` with a model in training.

    One thread trains. It calls `begin` until the model holds φ, then `meter.stepped` and `border` after each step.

    Attributes:
        meter: counts the steps.

    Args:
        trace: records everything that happens to θ.
        inner: private state of the training thread, such as optimisers.
        call_before_update: registers what is called before each change of θ; contributions need not wait for a border
            then. None: a user's own loop may change θ in other ways, such as to evaluate averaged weights.
    """

    def __init__(
        self,
        host: StateHost,
        local: LocalSpans,
        *,
        trace: Trace | None = None,
        inner: InnerState | None = None,
        call_before_update: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__(host)
        self.local = local
        self.meter = StepMeter()
        self._now = host.now
        self._wake: Callable[[], None] = lambda: None
        self._trace = trace
        self._inner = inner
        self._keeps_inner = False
        self._is_loaded = False
        self._contributed = [Counts() for _ in host.plan.fragments]
        self._lengths: tuple[Lengths, ...] = ()  # of the last contributions of fragments; replaced, never changed
        self._locals: dict[SpanId, _Local] = {}
        self._locks = {span: Lock() for span in host.plan.places}
        self._contributes_between = call_before_update is not None
        self._stillness = _Stillness()
        if call_before_update is not None:
            call_before_update(self._stillness.end)
        self._broken = ""
        self._undone: deque[tuple[float, int]] = deque(maxlen=MOST_UNDONE)
        self._moved: deque[SpanId] = deque()
        self._requests: deque[_Request] = deque()
        self._looks: deque[_Look] = deque()
        # Negative zeros: -0.0 + x is x, bit for bit, for every x.
        longest = max(place.stop - place.start for place in host.plan.places.values())
        self._nothing = read_only(np.full(longest, -0.0, np.float32))

    # -- for the event loop

    def request_contribution(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Request a contribution: at once if θ stands still and has made a step, otherwise at the next step border."""
        with suppress(IndexError):  # another thread may answer the last one meanwhile
            while self._requests[0].deadline < self._now():
                self._requests.popleft().answer(None)  # no step was made in time
        self._requests.append(_Request(round_index, fragment, deadline, answer, spans))
        self._wake()
        if self._contributes_between:
            self._soon(self._contribute_between)

    def look(self, slices: Sequence[Slice], hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        """Copy these slices of θ at the next step border, and call `hand_over` with them in the loop."""
        self._looks.append(_Look(slices, hand_over))
        self._wake()

    def keep_inner(self) -> None:
        """Save the training thread's private state at the next step border."""
        self._keeps_inner = self._inner is not None
        self._wake()

    def progress(self) -> Progress:
        """Return the training progress that heartbeats publish."""
        learnt, sent, given_up = reduce(Lengths.plus, self._lengths, Lengths())
        return replace(self.meter.progress, length_learnt=learnt, length_sent=sent, length_given_up=given_up)

    # -- for the training thread

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call this from now on when there is work for a step border."""
        self._wake = wake

    @property
    def counts(self) -> Counts:
        return self.meter.counts

    @property
    def fraction(self) -> float:
        """Progress of the run, 0 to 1: entries applied over entries planned, not wall time."""
        heights = sum(state.head.height for state in self._states.values())
        planned = self._plan.manifest.rounds.planned_cycles * max(1, len(self._states))
        return min(1.0, heights / planned)

    def begin(self) -> bool:
        """Set θ := φ once all spans are present; return whether that is done."""
        if not self._is_loaded and len(self._states) == len(self._plan.places):
            heads = {}
            for span, lock in self._locks.items():
                with lock:
                    self.local.write(span, self._states[span].anchor_N)
                    self._locals[span] = _Local()
                    heads[span] = self._states[span].head.digest
            self._is_loaded = True
            kept = self._load_inner()
            self.meter.begin()
            if self._trace is not None:
                self._trace.loaded(heads, kept)
        return self._is_loaded

    def note_batch(self, windows: int) -> None:
        """Record for the trace that a step takes that many windows from now on."""
        if self._trace is not None:
            self._trace.batch(self.counts.steps, windows)

    def undo(self, broken: str, loss: float | None = None) -> None:
        """Let the next border set θ := φ, instead of counting the step that has left a tensor not finite."""
        of_loss = "" if loss is None else f" (loss {loss:g})"
        self.begin_again(f"step {self.counts.steps + 1} left {broken} not finite{of_loss}")

    def begin_again(self, why: str) -> None:
        """Let the next border set θ := φ, with new moments."""
        self._broken = why

    def border(self) -> None:
        """Between two steps: apply pending updates to θ, and answer requests for contributions and copies."""
        self._stillness.end()
        try:
            self._border()
        finally:
            self._stillness.begin()

    def _border(self) -> None:
        if self._broken:
            self._restart()
        for _ in range(len(self._moved)):
            span = self._moved.popleft()
            lock = self._locks[span]
            if not lock.acquire(blocking=False):  # an entry is being applied right now; do not wait
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
            self.host.in_loop(partial(hand_over, self._copies(slices)))
        if self._keeps_inner:
            self.save_inner()

    def _restart(self) -> None:
        """Set θ := φ, with new moments and nothing in flight: what was learnt since the last entries is lost.

        Raises:
            ConfigError: this happens again and again.
        """
        why, self._broken = self._broken, ""
        for span, lock in self._locks.items():
            with lock:
                self._settle(span)  # for the trace
                # Bad memory may have spoilt φ of a damaged span, which will be replaced.
                self.local.write(span, np.nan_to_num(self._states[span].anchor_N, posinf=0.0, neginf=0.0))
                self._locals[span] = _Local()
        steps = self.counts.steps
        self._contributed = [self.counts for _ in self._contributed]
        if self._inner is not None:
            self._inner.clear()
        self.meter.failed(why)
        text = f"{why}; continuing from the shared model with new moments; {NOT_FINITE_REMEDY}"
        self.host.report_soon("not-finite", text)
        self._undone.append((self._now(), steps))
        since, steps_then = self._undone[0]
        is_often = self._now() - since <= self._plan.rules.cycle_seconds or steps == steps_then
        if len(self._undone) == MOST_UNDONE and is_often:
            raise ConfigError(
                f"{why}, the third failure in a row or within a cycle "
                f"({self._plan.rules.cycle_seconds:g} s); {NOT_FINITE_REMEDY}: lower the rate, leave out samples that "
                "are not finite, or train in float32"
            )

    def save_inner(self) -> None:
        self._keeps_inner = False
        if self._inner is None or not self._is_loaded or self._broken:
            return
        label = f"{time.time():.6f}"
        if self._trace is not None:
            self._trace.kept(self.counts.steps, label)
        try:
            self._inner.save(label)
        except StateError as error:
            self.host.report_soon("inner", str(error))

    def _load_inner(self) -> str | None:
        try:
            return self._inner.load() if self._inner is not None else None
        except StateError as error:
            self.host.report_soon("inner", str(error))
            return None

    def in_flight(self, span: SpanId) -> InFlight:
        """Return a span's contributions whose entries have not arrived."""
        return self._locals[span].in_flight if span in self._locals else _NOTHING_IN_FLIGHT

    @property
    def has_work(self) -> bool:
        return bool(self._moved or self._requests or self._looks or self._keeps_inner or self._broken)

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None = None
    ) -> FragmentContribution | None:
        """Encode a contribution of a fragment, or of its `chosen` spans; None without a step since the last one."""
        counts, before = self.counts, self._contributed[fragment]
        tokens, steps = counts.tokens - before.tokens, counts.steps - before.steps
        if steps == 0 or not self._is_loaded:
            return None
        spans, lengths = [], Lengths()
        for span in self._plan.spans_of(fragment):
            if (chosen is not None and span not in chosen) or span in self._damaged_spans:
                continue
            try:
                with self._locks[span]:
                    self._settle(span)
                    encoded, of_span = self._contribute_span(span, round_index)
                    spans.append(encoded)
                    lengths = lengths.plus(of_span)
            except (RoundError, NonFiniteUpdate):
                continue
        self._contributed[fragment] = counts
        self._lengths = (*self._lengths, lengths)[-LENGTH_CYCLES * len(self._contributed) :]
        if self._trace is not None:
            self._trace.contributed(self.counts.steps, round_index, fragment, chosen, lengths._asdict())
        return FragmentContribution(
            round=round_index, fragment=fragment, tokens=tokens, steps=steps, spans=tuple(spans)
        )

    def _answer(self, request: _Request) -> None:
        contribution = None
        if self._now() <= request.deadline:
            contribution = self.contribute(request.round, request.fragment, request.spans)
        self.host.in_loop(lambda: request.answer(contribution))

    def _contribute_span(self, span: SpanId, round_index: int) -> tuple[EncodedSpan, Lengths]:
        state, held = self._states[span], self._locals[span]
        limit = state.head.norm_limit(self._plan.rules.contribution_limit)
        pulls_back = held.unsent.pulls_back(limit)
        sent = self.local.contribute(span, state, held.in_flight, round_index, pulls_back=pulls_back)
        unsent, lengths = held.unsent.after(sent.norm, limit)
        self._locals[span] = replace(held, in_flight=sent.advance.in_flight, unsent=unsent)
        return EncodedSpan(span=span, parent=state.head.digest, norm=sent.norm, payload=sent.payload), lengths

    def _settle(self, span: SpanId) -> None:
        """Apply the pending update of a span to θ."""
        held = self._locals[span]
        if held.offset_N is None:
            return
        self.local.move(span, held.scale, held.offset_N)
        self._locals[span] = _Local(in_flight=held.in_flight, unsent=held.unsent)
        if self._trace is not None:
            for event in held.events:
                if isinstance(event, Absorbed):
                    self._trace.absorbed(self.counts.steps, span, event.entry, event.own_included)
                else:
                    self._trace.took(self.counts.steps, span, event.head)

    def _copies(self, slices: Sequence[Slice]) -> tuple[Vector, ...]:
        """Return copies of these slices of θ, allocated outside the heap so as not to displace a gradient."""
        copies = tuple(passing_vector(stop - start) for _, start, stop in slices)
        for copy_N, (fragment, start, stop) in zip(copies, slices, strict=True):
            np.copyto(copy_N, self.local.parameters.view(fragment, start, stop))
        return copies

    # -- on the follower thread

    def _contribute_between(self) -> None:
        """Answer requests for contributions while a step computes gradients; leave to the border what must wait."""
        with self._stillness.if_still() as is_still:
            while is_still and not self._moved and self._requests and self._is_clear(self._requests[0].fragment):
                self._answer(self._requests.popleft())

    def _is_clear(self, fragment: int) -> bool:
        """Return whether a fragment has made a step since its last contribution, and sending more leaves θ as it is.

        What is in flight may make θ change then, and so may what is too long to be sent.
        """
        has_stepped = self.counts.steps > self._contributed[fragment].steps
        held = [self._locals[span] for span in self._plan.spans_of(fragment) if span in self._locals]
        return has_stepped and not any(len(local.in_flight) or local.unsent.is_too_much for local in held)

    def _advance(self, held: dict[SpanId, SpanState], state: SpanState, update: SpanUpdate) -> None:
        span, plan = update.span, self._plan
        with self._locks[span]:
            local = self._locals.get(span)
            if local is None:
                super()._advance(held, state, update)
                return
            advance = follow_span(
                IslandSpan(state, local.in_flight, self._offset(span, local)),
                entry=update.absorbed,
                payload=update.payload,
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
                # The state that θ was based on is damaged, so θ restarts from the anchor.
                events = (*local.events, event) if self._trace is not None else ()
                self._locals[span] = _Local(scale=0.0, offset_N=state.anchor_N, events=events)
                self._moved.append(span)
            elif local is not None:
                before = IslandSpan(held[span], local.in_flight, self._offset(span, local))
                advance = replace_span(before, replacement=state, merge_rule=self._plan.merge)
                self._owe(span, local, advance.in_flight, advance.local_N, event)
            super()._put(held, span, state)
        self._wake()

    def _offset(self, span: SpanId, local: _Local) -> Vector:
        place = self._plan.places[span]
        return local.offset_N if local.offset_N is not None else self._nothing[: place.stop - place.start]

    def _owe(self, span: SpanId, local: _Local, in_flight: InFlight, offset_N: Vector, event: Absorbed | Took) -> None:
        share = self._plan.merge.in_flight_share
        self._locals[span] = _Local(
            in_flight=in_flight,
            unsent=local.unsent._replace(length=share * local.unsent.length),
            scale=local.scale * share,
            offset_N=offset_N,
            events=(*local.events, event) if self._trace is not None else (),
        )
        if local.offset_N is None:
            self._moved.append(span)
        self._wake()
