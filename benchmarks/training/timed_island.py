"""State that records steps and included contributions, and training threads that the benchmark controls.

All other code is that of a real island.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.training_thread import StepRunner, Steps, TrainingThread
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.session.own_model import OwnModel
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.storage.trace import Trace


class Timings(Trace):
    """Trace of an island's steps and of its included contributions. Only the training thread writes it.

    Attributes:
        borders: end times of the steps on the monotonic clock.
        included: for each round, the number of entries that included this island.
        followed_at: for each round, the time at which θ last followed an entry.
        awaited, awaited_round: spans of the newest contribution whose entries have not arrived, and its round.
    """

    def __init__(self, round_of: Callable[[Digest], int]) -> None:
        self.borders: list[float] = []
        self.included: Counter[int] = Counter()
        self.followed_at: dict[int, float] = {}
        self.awaited: set[SpanId] = set()
        self.awaited_round = -1
        self._round_of = round_of

    def absorbed(self, steps: int, span: SpanId, entry: Digest, own_included: bool) -> None:
        """Record that θ followed an entry."""
        round_index = self._round_of(entry)
        if round_index == self.awaited_round:
            self.awaited.discard(span)
        self.included[round_index] += own_included
        self.followed_at[round_index] = time.monotonic()

    def _write(self, what: str, **figures: Any) -> None:
        """Write nothing."""


class TimedState(TrainedState):
    """State that records contributions and entries, and their processor time.

    Attributes:
        timings: record of contributions and entries.
        outer_seconds: processor time of contributing, following and merging so far.
    """

    def __init__(self, host: StateHost, local: LocalSpans) -> None:
        self._rounds: dict[Digest, int] = {}
        self.timings = Timings(self._rounds.pop)
        self._followed_seconds = self._border_seconds = 0.0
        super().__init__(host, local, trace=self.timings)

    @property
    def outer_seconds(self) -> float:
        """Processor time of outer work, summed over both threads."""
        return self._followed_seconds + self._border_seconds

    def border(self) -> None:
        """Follow entries and contribute."""
        began = time.thread_time()
        super().border()
        self._border_seconds += time.thread_time() - began

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None = None
    ) -> FragmentContribution | None:
        """Contribute a fragment to a round."""
        contribution = super().contribute(round_index, fragment, chosen)
        if contribution is not None:
            self.timings.awaited_round = round_index
            self.timings.awaited = {encoded.span for encoded in contribution.spans}
        return contribution

    def _advance(self, held: dict[SpanId, SpanState], state: SpanState, update: SpanUpdate) -> None:
        began = time.thread_time()
        self._rounds[update.absorbed.digest] = update.absorbed.round
        super()._advance(held, state, update)
        self._followed_seconds += time.thread_time() - began


class PacedThread(TrainingThread):
    """Training thread that the benchmark can pause.

    Attributes:
        rests: no inner steps are made while true; work from the swarm is still done.
        exchanges: whether this is a window with the exchange.
    """

    def __init__(self, *, loop: InnerLoop, state: TimedState, clock: RoundClock, now: Callable[[], float]) -> None:
        self.inner = StepRunner(Steps(loop), state)
        super().__init__(state=state, step=self.step)
        self.rests, self.exchanges = True, False
        self.timings, self.round_clock, self.now = state.timings, clock, now

    def step(self) -> None:
        """Make one step, and record when it ended."""
        self.inner.step()
        self.timings.borders.append(time.monotonic())

    def processor_seconds(self) -> float:
        """Return the processor time of this thread so far."""
        assert self._thread.ident is not None, "start it first"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def may_step(self) -> bool:
        return super().may_step() and not self.rests


class OwnLoopThread(PacedThread):
    """Training thread that does the work of `Swarm.step` after each step, on a model allocated by PyTorch."""

    def __init__(self, *, state: TimedState, **more: Any) -> None:
        super().__init__(state=state, **more)
        self._own = OwnModel(self.inner.loop.model, ())
        self._own.state = state

    def step(self) -> None:
        """Make one step, report it, and record when that ended."""
        step = self.inner.loop.step()
        self._own.stepped(step.tokens, step.loss)
        self._own.border()
        self.timings.borders.append(time.monotonic())


class BlockingThread(PacedThread):
    """Training thread that waits after each contribution until θ has followed the entries of its round.

    This is DiLoCo with a blocking exchange. If a span gets no entry, the thread waits until the round is over.
    """

    def may_step(self) -> bool:
        return super().may_step() and not (self.exchanges and self._awaits_entries())

    def _awaits_entries(self) -> bool:
        timings = self.timings
        return bool(timings.awaited) and self.now() < self.round_clock.begin(timings.awaited_round + 1)
