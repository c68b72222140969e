"""An island that notes when it steps and what becomes of its contributions, and threads that a bench paces.

All else is the very code of a volunteer's island.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import BatchStream
from p2p_diloco.island.inner_loop import InnerStep
from p2p_diloco.island.model import DecoderModel
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.round import FragmentContribution
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.island import Island
from p2p_diloco.trainer.island_thread import IslandThread
from p2p_diloco.trainer.run_plan import RunPlan


class TimedIsland(Island):
    """Notes what happens to it. Its thread writes, others read what is finished.

    Attributes:
        borders: when each step ended, by the monotonic clock.
        included: spans of each round whose entry included this island.
        followed_at: when the last entry of each round was followed.
        outer_seconds: processor time of contributing and following entries so far.
        awaited: spans of the newest contribution whose entries have not come, and its round.
    """

    def __init__(self, *, plan: RunPlan, model: DecoderModel, stream: BatchStream) -> None:
        super().__init__(plan=plan, model=model, stream=stream, device=torch.device("cpu"))
        self.borders: list[float] = []
        self.included: Counter[int] = Counter()
        self.followed_at: dict[int, float] = {}
        self.outer_seconds = 0.0
        self.awaited: set[SpanId] = set()
        self.awaited_round = -1

    def step(self) -> InnerStep:
        """Make one inner step."""
        step = super().step()
        self.borders.append(time.monotonic())
        return step

    def absorb(self, update: SpanUpdate) -> None:
        """Follow an entry."""
        began = time.thread_time()
        super().absorb(update)
        round_index = update.absorbed.round
        if round_index == self.awaited_round:
            self.awaited.discard(update.span)
        self.included[round_index] += update.own_included
        self.followed_at[round_index] = time.monotonic()
        self.outer_seconds += time.thread_time() - began

    def contribute(
        self, round_index: int, fragment: int, chosen: frozenset[SpanId] | None = None
    ) -> FragmentContribution | None:
        """Contribute a fragment to a round."""
        began = time.thread_time()
        contribution = super().contribute(round_index, fragment, chosen)
        if contribution is not None:
            self.awaited_round = round_index
            self.awaited = {encoded.span for encoded in contribution.spans}
        self.outer_seconds += time.thread_time() - began
        return contribution


class PacedThread(IslandThread):
    """A volunteer's thread, but that a bench can let it rest.

    Attributes:
        rests: makes no inner steps while true; what the swarm hands over is done all the same.
        exchanges: whether this is a window with the exchange.
    """

    def __init__(self, *, island: TimedIsland, clock: RoundClock, now: Callable[[], float], **more: Any) -> None:
        super().__init__(island=island, now=now, **more)
        self.rests, self.exchanges = True, False
        self.timed, self.round_clock = island, clock

    def processor_seconds(self) -> float:
        """Return what this thread has had of the processor so far."""
        assert self._thread.ident is not None, "start it first"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def _may_step(self) -> bool:
        return not self.rests and super()._may_step()


class BlockingThread(PacedThread):
    """Waits after each contribution until the entries of its round are followed: DiLoCo with the exchange in front.

    A span that gets no entry is waited for until the round is over.
    """

    def _may_step(self) -> bool:
        return not (self.exchanges and self._awaits_entries()) and super()._may_step()

    def _awaits_entries(self) -> bool:
        island = self.timed
        return bool(island.awaited) and self._now() < self.round_clock.begin(island.awaited_round + 1)
