"""The training thread: inner steps without end, and at step borders what the swarm has handed over.

It alone touches the island. The event loop hands commands over and reads frozen span states; neither side ever waits
for the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from p2p_diloco.ids import SpanId
from p2p_diloco.island.evaluation import Slice
from p2p_diloco.island.inner_loop import InnerStep
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.swarm.known_answer import check_known_answer
from p2p_diloco.swarm.replica import MEMORY_ERRORS, Answer, SpanDamaged, SpanUpdate
from p2p_diloco.trainer.island import Island

IDLE_SECONDS = 0.05
LOSS_SMOOTHING = 0.95


class _Snapshot(NamedTuple):
    round: int
    fragment: int
    deadline: float
    answer: Answer
    spans: frozenset[SpanId] | None


class _Replacement(NamedTuple):
    span: SpanId
    state: SpanState


class _Look(NamedTuple):
    slices: Sequence[Slice]
    hand_over: Callable[[tuple[Vector, ...]], None]


Command = SpanUpdate | _Replacement | _Snapshot | _Look


class IslandThread:
    """One island's thread; a `Replica` for the swarm.

    Args:
        island: nobody else may call it once the thread runs.
        now: swarm seconds, callable from any thread.
        in_loop: hands a call over to the event loop.
        died: told, in the loop, when training ended with an error.
        damaged: told of spans to be replaced because memory is damaged; without it training ends.
    """

    def __init__(
        self,
        *,
        island: Island,
        now: Callable[[], float],
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
        damaged: SpanDamaged | None = None,
    ) -> None:
        self._now = now
        self._damaged = damaged
        self._damaged_spans: set[SpanId] = set()
        self._in_loop = in_loop
        self._died = died
        self.island = island
        self._commands: deque[Command] = deque()
        self._has_command = threading.Condition()
        self._stopping = False
        self._training = True
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
        """Wait for the end of the thread; False when it did not come in time. One that never began has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span as it is now; None while it is damaged."""
        return self.island.states.get(span) if span not in self._damaged_spans else None

    def states(self) -> dict[SpanId, SpanState]:
        """Return all spans as they are now."""
        return dict(self.island.states)

    def moving_states(self) -> Mapping[SpanId, SpanState]:
        """Return a view of the spans as they are whenever it is read: it holds none that has been replaced.

        Empty while one is damaged, so that no checkpoint is made of it.
        """
        return MappingProxyType(self.island.states if not self._damaged_spans else {})

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""
        self._hand_over(update)

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Take a transferred span at the next step border."""
        self._hand_over(_Replacement(span, state))

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Contribute at the next step border."""
        self._hand_over(_Snapshot(round_index, fragment, deadline, answer, spans))

    def look(self, slices: Sequence[Slice], hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        """Hand a copy of these slices of θ, as they are at the next step border, to `hand_over`, in the loop."""
        self._hand_over(_Look(slices, hand_over))

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
            check_known_answer()
            began = time.monotonic()
            while not (self._stopping and not self._commands):
                while self._commands:
                    self._do(self._commands[0])
                    self._commands.popleft()
                if self._may_step():
                    self._note(self.island.step(), time.monotonic() - began)
                    continue
                with self._has_command:
                    if not self._commands and not self._stopping:
                        self._has_command.wait(IDLE_SECONDS)
        except BaseException as error:
            failure = error
            self._in_loop(lambda: self._died(failure))

    def _may_step(self) -> bool:
        """Tell whether an inner step is due; else the next command is waited for."""
        return self._training and not self._stopping and self.island.load()

    def _note(self, step: InnerStep, seconds: float) -> None:
        if not step.applied:
            return  # its loss may be NaN, which would never leave the average again
        before = self._progress
        loss = step.loss if before.steps == 0 else LOSS_SMOOTHING * before.loss + (1 - LOSS_SMOOTHING) * step.loss
        self._progress = Progress(
            tokens=self.island.loop.tokens,
            steps=self.island.loop.steps,
            tokens_per_second=self.island.loop.tokens / max(seconds, 1e-3),
            loss=loss,
        )

    def _do(self, command: Command) -> None:
        island = self.island
        match command:
            case SpanUpdate():
                self._absorb(command)
            case _Replacement():
                island.take(command.span, command.state, anew=command.span in self._damaged_spans)
                self._damaged_spans.discard(command.span)
            case _Snapshot():
                is_late = self._now() > command.deadline
                contribution = None
                if not is_late:
                    contribution = island.contribute(command.round, command.fragment, self._sound(command.spans))
                self._in_loop(lambda: command.answer(contribution))
            case _Look():
                vectors = island.look(command.slices)
                self._in_loop(lambda: command.hand_over(vectors))

    def _absorb(self, update: SpanUpdate) -> None:
        """Follow an entry; a span that cannot is left as it is, and follows no more before it is replaced."""
        if update.span in self._damaged_spans:
            return  # its replacement stands behind this entry
        try:
            self.island.absorb(update)
        except MEMORY_ERRORS as error:
            told, reason = self._damaged, str(error)
            if told is None:
                raise
            self._damaged_spans.add(update.span)
            self._in_loop(lambda: told(update.span, reason))

    def _sound(self, spans: frozenset[SpanId] | None) -> frozenset[SpanId] | None:
        """Return the spans to contribute without those that are damaged."""
        if not self._damaged_spans:
            return spans
        return (spans if spans is not None else frozenset(self.island.states)) - self._damaged_spans
