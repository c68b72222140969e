"""Island of this project as a process: the code of a real island, with swarm time that runs only for exchanges.

Between exchanges the same process continues to train, so windows differ only by the exchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.meters import cpu_seconds
from benchmarks.staged_peer import StagedPeer
from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, steps_within
from benchmarks.training.our_run import plan_of
from benchmarks.training.timed_island import BlockingThread, OwnLoopThread, PacedThread, TimedState
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.run_text import open_run_text, open_stream
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.ids import SpanId
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.island.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.outer.state import SpanState

GATHER_SECONDS = 1.5
"""Maximum length of a round in which the peers find each other; time then jumps to the next round."""
LINGER_SECONDS = 0.3
"""Time after the last entry in which other peers can still request data."""
_STEP_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.02
_THREADS = {OURS: PacedThread, OWN_LOOP: OwnLoopThread, BLOCKING: BlockingThread}


class OurIsland(StagedPeer):
    """One island. Its event loop runs only inside these calls; its training thread runs all the time."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__(order, plan_of(decode_signed_manifest(bytes.fromhex(order["manifest"])).manifest))
        self._thread_class = _THREADS[order["system"]]
        self._state: TimedState
        self._thread: PacedThread

    # -- commands of the worker

    def gather(self, round: int, at: float) -> dict[str, Any]:
        """Take part in a round or in its first part, and return what the roster of the next round lacks."""
        return {"missing": self.run(self._gather(round, at))}

    def settle(self, round: int, at: float) -> dict[str, Any]:
        """Stop training, and run a round in which content digests are compared."""
        self._thread.rests = True
        is_settled = self.run(self.compare_contents(round, at))
        return {"is_settled": is_settled, "missing": self.missing_members(round + 1)}

    def transmit(self, round: int, at: float) -> dict[str, Any]:
        """Exchange in a round without training. Return the time until its last entry, None if one is missing."""
        return {"seconds": self.run(self._transmit(round, at))}

    def roster(self, round: int) -> dict[str, Any]:
        """Return what the roster of a round lacks."""
        return {"missing": self.missing_members(round)}

    def train(self, at: float, seconds: float) -> dict[str, Any]:
        """Train without an exchange."""
        return self.run(self._train(at, seconds))

    def exchange(self, round: int, num_rounds: int, num_cycles: int, at: float) -> dict[str, Any]:
        """Train while exchanging in `num_rounds` rounds."""
        return self.run(self._exchange(round, num_rounds, at))

    def close(self) -> None:
        """Stop the transport with its daemon, and all threads."""
        self._thread.stop_training()
        super().close()

    # -- start

    def make_thread(self, states: dict[SpanId, SpanState]) -> PacedThread:
        """Return the thread of a training island."""
        plan = self.plan
        corpus = open_run_text(plan.manifest.data, None)
        stream = open_stream(corpus, plan, self.key.peer, 1)
        model = build_model(plan.shape, plan.manifest.model.seed)
        loop = InnerLoop(model, stream, plan.inner, torch.device("cpu"))
        if self._thread_class is not OwnLoopThread:
            lay_end_to_end(model, plan.fragments)
        local = LocalSpans(plan, LocalParameters(model, plan.fragments))
        self._state = TimedState(self.state_host(), local)
        self._state.hold(states)
        self._thread = self._thread_class(
            loop=loop,
            state=self._state,
            clock=plan.rules.clock,
            now=self.clock.now,
        )
        return self._thread

    async def _gather(self, round_index: int, at: float) -> str:
        self._thread.rests = False
        lasts = min(self.plan.rules.clock.round_seconds, GATHER_SECONDS)
        async with self.driven(round_index, at, 1) as driving:
            await asyncio.sleep(max(at + lasts - time.monotonic(), 0.0))
            self.check(driving)
        return self.missing_members(round_index + 1)

    async def _transmit(self, round_index: int, at: float) -> float | None:
        clock, timings = self.plan.rules.clock, self._state.timings
        num_spans = self.plan.rules.num_spans[clock.fragment(round_index)]
        self._thread.rests = True
        async with self.driven(round_index, at, 1) as driving:
            give_up = at + clock.round_seconds
            while timings.included[round_index] < num_spans and time.monotonic() < give_up:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
            self.check(driving)
            await asyncio.sleep(LINGER_SECONDS)
        return timings.followed_at[round_index] - at if timings.included[round_index] == num_spans else None

    # -- windows

    async def _train(self, at: float, seconds: float) -> dict[str, Any]:
        self._thread.rests = False
        await _sleep_until(at)
        before = self._work()
        await _sleep_until(at + seconds)
        return await self._answer(at, seconds, before)

    async def _exchange(self, round_index: int, num_rounds: int, at: float) -> dict[str, Any]:
        self._thread.rests = False
        seconds = num_rounds * self.plan.rules.clock.round_seconds
        async with self.driven(round_index, at, num_rounds) as driving:
            before = self._work()
            self._thread.exchanges = True
            await _sleep_until(at + seconds)
            self._thread.exchanges = False
            self.check(driving)
        num_spans = self.plan.rules.num_spans
        indices = range(round_index, round_index + num_rounds)
        included = sum(self._state.timings.included[index] / num_spans[index % len(num_spans)] for index in indices)
        return await self._answer(at, seconds, before, included=included, due=float(num_rounds))

    async def _answer(self, at: float, seconds: float, before: dict[str, float], **more: float) -> dict[str, Any]:
        after = self._work()
        work = {name: after[name] - before[name] for name in before}
        borders, give_up = self._state.timings.borders, time.monotonic() + _STEP_PATIENCE_SECONDS
        # Wait for the end of the step that crosses the end of the window, to count the fraction inside.
        while max(borders[-1:], default=at) < at + seconds and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        for failure in self.failures:
            raise failure
        steps = steps_within(borders, at, at + seconds)
        return {"seconds": seconds, "steps": steps, "work": work, **more}

    def _work(self) -> dict[str, float]:
        """Return the processor time of this island so far, in the parts of `Work`."""
        training = self._thread.processor_seconds()
        return {
            "training": training,
            "outer": self._state.outer_seconds,
            "rest": time.process_time() - training,
            "daemon": cpu_seconds([self.transport.daemon.pid]),
        }


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(at - time.monotonic(), 0.0))
