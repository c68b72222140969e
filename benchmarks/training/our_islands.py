"""Island of this project as a process: the code of a real island, with swarm time that runs only for exchanges.

Between exchanges the same process continues to train, so windows differ only by the exchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.meters import cpu_seconds
from benchmarks.staged_peer import StagedPeer
from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, steps_within
from benchmarks.training.our_run import plan_of
from benchmarks.training.timed_island import BlockingThread, OwnLoopThread, PacedThread, TimedState
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.peer.founding import make_start
from p2p_diloco.peer.local_spans import LocalSpans
from p2p_diloco.peer.processor import wake_politely
from p2p_diloco.peer.run_text import open_run_text, open_stream
from p2p_diloco.signing import SigningKey
from p2p_diloco.span.vector_work import warm_up
from p2p_diloco.training.inner_loop import InnerLoop
from p2p_diloco.training.model import build_model
from p2p_diloco.training.parameters import LocalParameters, lay_end_to_end

GATHER_SECONDS = 1.5
"""Maximum length of a round in which the peers find each other; time then jumps to the next round."""
LINGER_SECONDS = 0.3
"""Time after the last entry in which other peers can still request data."""
_STEP_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.02
_THREADS = {OURS: PacedThread, OWN_LOOP: OwnLoopThread, BLOCKING: BlockingThread}


class OurIsland:
    """One island. Its event loop runs only inside these calls; its training thread runs all the time."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        wake_politely()  # as `p2p-diloco join` does
        torch.set_num_threads(1)
        self._place = int(order["place"])
        self._thread_class = _THREADS[order["system"]]
        signed = decode_signed_manifest(bytes.fromhex(order["manifest"]))
        self._plan = plan_of(signed.manifest)
        self._peer = StagedPeer(
            signed=signed,
            plan=self._plan,
            organiser=SigningKey(bytes.fromhex(order["organiser"])),
            folder=Path(order["folder"]),
            host=order["address"],
        )
        self._state: TimedState
        self._thread: PacedThread

    # -- commands of the worker

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a command; see the methods."""
        match word["do"]:
            case "start":
                warm_up()
                return self._peer.start()
            case "meet":
                self._meet(word["words"])
                return {}
            case "gather":
                return {"missing": self._peer.run(self._gather(word["round"], word["at"]))}
            case "settle":
                is_settled = self._peer.run(self._settle(word["round"], word["at"]))
                return {"is_settled": is_settled, "missing": self._peer.missing_members(word["round"] + 1)}
            case "transmit":
                return {"seconds": self._peer.run(self._transmit(word["round"], word["at"]))}
            case "roster":
                return {"missing": self._peer.missing_members(word["round"])}
            case "train":
                return self._peer.run(self._train(word["at"], word["seconds"]))
            case "exchange":
                return self._peer.run(self._exchange(word["round"], word["num_rounds"], word["at"]))
        raise ValueError(f"unknown command {word['do']!r}")

    def close(self) -> None:
        """Stop the transport with its daemon, and all threads."""
        self._thread.stop_training()
        self._peer.close()

    # -- start

    def _meet(self, words: list[dict[str, Any]]) -> None:
        """Create the same start and founding roster as all other peers, connect to them, and start training."""
        self._peer.found(words[0]["peer"], make_start(self._plan), self._make_thread)
        self._peer.link(words, self._place)

    def _make_thread(self, states: dict[SpanId, SpanState]) -> PacedThread:
        peer, plan = self._peer, self._plan
        corpus = open_run_text(plan.manifest.data, None)
        stream = open_stream(corpus, plan, plan.rules.run, peer.key.peer, 1)
        model = build_model(plan.shape, plan.manifest.model.seed)
        loop = InnerLoop(model, stream, plan.inner, torch.device("cpu"))
        if self._thread_class is not OwnLoopThread:
            lay_end_to_end(model, plan.fragments)
        local = LocalSpans(plan, LocalParameters(model, plan.fragments))
        self._state = TimedState(plan, local, **peer.of_state())
        self._state.hold(states)
        self._thread = self._thread_class(
            loop=loop,
            state=self._state,
            clock=plan.rules.clock,
            now=peer.clock.now,
            in_loop=peer.in_loop,
            died=peer.failures.append,
        )
        return self._thread

    async def _gather(self, round_index: int, at: float) -> str:
        """Take part in a round or in its first part, and return what the roster of the next round lacks."""
        self._thread.rests = False
        lasts = min(self._plan.rules.clock.round_seconds, GATHER_SECONDS)
        async with self._peer.driven(round_index, at, 1) as driving:
            await asyncio.sleep(max(at + lasts - time.monotonic(), 0.0))
            self._peer.check(driving)
        return self._peer.missing_members(round_index + 1)

    async def _settle(self, round_index: int, at: float) -> bool:
        """Stop training, and run a round in which content digests are compared."""
        self._thread.rests = True
        return await self._peer.settle(round_index, at)

    async def _transmit(self, round_index: int, at: float) -> float | None:
        """Exchange in a round without training. Return the time until its last entry, None if one is missing."""
        clock, timings = self._plan.rules.clock, self._state.timings
        num_spans = self._plan.rules.num_spans[clock.fragment(round_index)]
        self._thread.rests = True
        async with self._peer.driven(round_index, at, 1) as driving:
            give_up = at + clock.round_seconds
            while timings.included[round_index] < num_spans and time.monotonic() < give_up:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
            self._peer.check(driving)
            await asyncio.sleep(LINGER_SECONDS)
        return timings.followed_at[round_index] - at if timings.included[round_index] == num_spans else None

    # -- windows

    async def _train(self, at: float, seconds: float) -> dict[str, Any]:
        """Train without an exchange."""
        self._thread.rests = False
        await _sleep_until(at)
        before = self._work()
        await _sleep_until(at + seconds)
        return await self._answer(at, seconds, before)

    async def _exchange(self, round_index: int, num_rounds: int, at: float) -> dict[str, Any]:
        """Train while exchanging in `num_rounds` rounds."""
        self._thread.rests = False
        seconds = num_rounds * self._plan.rules.clock.round_seconds
        async with self._peer.driven(round_index, at, num_rounds) as driving:
            before = self._work()
            self._thread.exchanges = True
            await _sleep_until(at + seconds)
            self._thread.exchanges = False
            self._peer.check(driving)
        num_spans = self._plan.rules.num_spans
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
        for failure in self._peer.failures:
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
            "daemon": cpu_seconds([self._peer.transport.daemon.pid]),
        }


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(at - time.monotonic(), 0.0))
