"""The training thread: inner steps without end, and at step borders what the swarm has handed over.

It owns θ, the contributions in flight and this peer's copy of φ and m. The event loop hands commands over and reads
frozen span states; neither side ever waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from p2p_diloco.errors import NonFiniteUpdate, RoundError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import BatchStream
from p2p_diloco.island.inner_loop import InnerLoop, InnerStep
from p2p_diloco.island.model import DecoderModel
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.advance import (
    SpanAdvance,
    advance_span,
    prepare_contribution,
    record_contribution,
    replace_span,
)
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution
from p2p_diloco.swarm.replica import Answer, SpanUpdate
from p2p_diloco.swarm.vector_work import encode_contribution
from p2p_diloco.trainer.run_plan import RunPlan

IDLE_SECONDS = 0.05
LOSS_SMOOTHING = 0.95


class _Snapshot(NamedTuple):
    round: int
    fragment: int
    deadline: float
    answer: Answer


class _Replacement(NamedTuple):
    span: SpanId
    state: SpanState


class _Look(NamedTuple):
    hand_over: Callable[[tuple[Vector, ...]], None]


Command = SpanUpdate | _Replacement | _Snapshot | _Look


@dataclass(slots=True)
class _Since:
    """Tokens and steps of an island when a fragment was last contributed."""

    tokens: int = 0
    steps: int = 0


class IslandThread:
    """One island's thread; a `Replica` for the swarm.

    Args:
        now: swarm seconds, callable from any thread.
        in_loop: hands a call over to the event loop.
        died: told, in the loop, when training ended with an error.
        trains: False for a peer that only holds the state.
    """

    def __init__(
        self,
        *,
        plan: RunPlan,
        model: DecoderModel,
        stream: BatchStream,
        device: torch.device,
        now: Callable[[], float],
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._now = now
        self._in_loop = in_loop
        self._died = died
        self._loop = InnerLoop(model, stream, plan.inner, device)
        self._parameters = LocalParameters(model, plan.fragments)
        self._states: dict[SpanId, SpanState] = {}
        self._in_flight: dict[SpanId, InFlight] = {}
        self._since = [_Since() for _ in plan.fragments]
        self._commands: deque[Command] = deque()
        self._has_command = threading.Condition()
        self._stopping = False
        self._training = True
        self._local_is_loaded = False
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    # -- for the event loop

    def start(self) -> None:
        """Begin; training starts when all spans are there."""
        self._thread.start()

    def stop_training(self) -> None:
        """Make no inner steps any more, but go on absorbing entries."""
        self._training = False

    def stop(self) -> None:
        """Finish what was handed over and end the thread."""
        with self._has_command:
            self._stopping = True
            self._has_command.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread; False when it did not come in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span as it is now."""
        return self._states.get(span)

    def states(self) -> dict[SpanId, SpanState]:
        """Return all spans as they are now."""
        return dict(self._states)

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""
        self._hand_over(update)

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Take a transferred span at the next step border."""
        self._hand_over(_Replacement(span, state))

    def take_snapshot(self, round_index: int, fragment: int, deadline: float, answer: Answer) -> None:
        """Contribute at the next step border."""
        self._hand_over(_Snapshot(round_index, fragment, deadline, answer))

    def look(self, hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        """Hand a copy of θ, fragment by fragment, to `hand_over`, in the loop."""
        self._hand_over(_Look(hand_over))

    def progress(self) -> Progress:
        """Return what heartbeats say of this island."""
        return self._progress

    def wait_until_idle(self) -> None:
        """Wait until everything that was handed over has been done; for a thread that may wait."""
        while self._commands and self._thread.is_alive():
            time.sleep(IDLE_SECONDS)

    def _hand_over(self, command: Command) -> None:
        with self._has_command:
            self._commands.append(command)
            self._has_command.notify()

    # -- the thread

    def _run(self) -> None:
        try:
            began = time.monotonic()
            while not (self._stopping and not self._commands):
                while self._commands:
                    self._do(self._commands[0])
                    self._commands.popleft()
                if self._training and not self._stopping and self._load_local():
                    self._note(self._loop.step(), time.monotonic() - began)
                    continue
                with self._has_command:
                    if not self._commands and not self._stopping:
                        self._has_command.wait(IDLE_SECONDS)
        except BaseException as error:
            failure = error
            self._in_loop(lambda: self._died(failure))

    def _load_local(self) -> bool:
        if not self._local_is_loaded and len(self._states) == len(self._plan.places):
            for span, place in self._plan.places.items():
                self._parameters.write(span.fragment, place.start, place.stop, self._states[span].anchor_N)
            self._local_is_loaded = True
        return self._local_is_loaded

    def _note(self, step: InnerStep, seconds: float) -> None:
        if not step.applied:
            return  # its loss may be NaN, which would never leave the average again
        before = self._progress
        loss = step.loss if before.steps == 0 else LOSS_SMOOTHING * before.loss + (1 - LOSS_SMOOTHING) * step.loss
        self._progress = Progress(
            tokens=self._loop.tokens,
            steps=self._loop.steps,
            tokens_per_second=self._loop.tokens / max(seconds, 1e-3),
            loss=loss,
        )

    def _do(self, command: Command) -> None:
        match command:
            case SpanUpdate():
                self._absorb(command)
            case _Replacement():
                self._take(command)
            case _Snapshot():
                contribution = self._contribute(command)
                self._in_loop(lambda: command.answer(contribution))
            case _Look():
                vectors = self._parameters.read_all()
                self._in_loop(lambda: command.hand_over(vectors))

    def _absorb(self, update: SpanUpdate) -> None:
        span, plan = update.span, self._plan
        state, place = self._states[span], plan.places[span]
        update_N = plan.codecs.entry.decode(update.payload, place.stop - place.start)
        if not self._local_is_loaded:
            self._states[span] = absorb(state, entry=update.absorbed, update_N=update_N, rule=plan.outer)
            return
        advance = advance_span(
            state,
            self._in_flight.get(span, InFlight()),
            self._parameters.read(span.fragment, place.start, place.stop),
            entry=update.absorbed,
            update_N=update_N,
            own_included=update.own_included,
            outer_rule=plan.outer,
            merge_rule=plan.merge,
        )
        self._keep(span, advance)
        heights = sum(state.head.height for state in self._states.values())
        self._loop.set_progress(heights / len(self._states) / plan.manifest.rounds.planned_cycles)

    def _take(self, command: _Replacement) -> None:
        span, place = command.span, self._plan.places[command.span]
        if not self._local_is_loaded:
            self._states[span] = command.state
            return
        self._keep(
            span,
            replace_span(
                self._states[span],
                self._in_flight.get(span, InFlight()),
                self._parameters.read(span.fragment, place.start, place.stop),
                replacement=command.state,
                merge_rule=self._plan.merge,
            ),
        )

    def _keep(self, span: SpanId, advance: SpanAdvance) -> None:
        place = self._plan.places[span]
        self._states[span] = advance.state
        self._in_flight[span] = advance.in_flight
        self._parameters.write(span.fragment, place.start, place.stop, advance.local_N)

    def _contribute(self, command: _Snapshot) -> FragmentContribution | None:
        since = self._since[command.fragment]
        tokens, steps = self._loop.tokens - since.tokens, self._loop.steps - since.steps
        if self._now() > command.deadline or steps == 0 or not self._local_is_loaded:
            return None
        spans = []
        for span in self._plan.spans_of(command.fragment):
            try:
                spans.append(self._contribute_span(span, command.round))
            except (RoundError, NonFiniteUpdate):
                continue
        since.tokens, since.steps = self._loop.tokens, self._loop.steps
        return FragmentContribution(
            round=command.round, fragment=command.fragment, tokens=tokens, steps=steps, spans=tuple(spans)
        )

    def _contribute_span(self, span: SpanId, round_index: int) -> EncodedSpan:
        plan, state, place = self._plan, self._states[span], self._plan.places[span]
        codec, elements = plan.codecs.contribution, place.stop - place.start
        in_flight = self._in_flight.get(span, InFlight())
        local_N = self._parameters.read(span.fragment, place.start, place.stop)
        kappa = plan.manifest.limits.kappa
        prepared = prepare_contribution(state, in_flight, local_N, round_index=round_index, kappa=kappa)
        prepared, payload = encode_contribution(codec, prepared)
        advance = record_contribution(
            state,
            in_flight,
            local_N,
            round_index=round_index,
            decoded_N=codec.decode(payload, elements),
            max_in_flight=plan.manifest.limits.in_flight,
        )
        self._in_flight[span] = advance.in_flight
        if advance.local_N is not local_N:
            self._parameters.write(span.fragment, place.start, place.stop, advance.local_N)
        return EncodedSpan(span=span, parent=state.head.digest, norm=prepared.norm, payload=payload)
