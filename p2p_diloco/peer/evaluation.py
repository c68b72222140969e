"""Measure the held-out loss of the anchor and of θ during training, in a separate thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import nn

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.ids import SpanId
from p2p_diloco.memory.slabs import passing_vector
from p2p_diloco.outer.state import SpanState
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.text.data import Text
from p2p_diloco.training.evaluation import AnchorEvaluation, Slice, WholeEvaluation
from p2p_diloco.training.text_model import TextModel

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Loss on the held-out text, nats per token."""

    anchor: float
    local: float


def evaluation_of(
    plan: RunPlan, model: TextModel | None, text: Text, live: nn.Module | None = None
) -> AnchorEvaluation | WholeEvaluation:
    """Return the evaluation of a run's model on the held-out part of a text.

    Args:
        model: the model; the built-in one may be None.
        live: the module in training, if the model is a copy of it.
    """
    if plan.built_in is not None:
        return AnchorEvaluation(plan.built_in, plan.fragments, text)
    assert model is not None, "only the built-in model is evaluated part by part"
    return WholeEvaluation(model, plan.fragments, text, live=live)


class HeldOutWatch:
    """Measures both losses, copying only one part of the model at a time.

    Each part is read when it is needed. During training, a fragment may be updated between two parts; once training
    has stopped, the figures are exact.
    """

    def __init__(self, plan: RunPlan, evaluation: AnchorEvaluation | WholeEvaluation) -> None:
        self._plan = plan
        self._evaluation = evaluation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._measuring = asyncio.Lock()

    async def measure(self, state: TrainedState) -> HeldOutLoss:
        """Measure the current state; concurrent measurements run one after the other."""
        async with self._measuring:
            anchor = await self._loss(lambda part: self._anchor_of(state, part))
            return HeldOutLoss(anchor=anchor, local=await self._loss(lambda part: _local_of(state, part)))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _loss(self, fetch: Callable[[Sequence[Slice]], Awaitable[Sequence[Vector]]]) -> float:
        loop, loss = asyncio.get_running_loop(), None
        # In the thread, which may still be busy with a cancelled measurement.
        await loop.run_in_executor(self._thread, self._evaluation.begin)
        for part in self._evaluation.parts:
            loss = await loop.run_in_executor(self._thread, self._evaluation.take, await fetch(part))
        assert loss is not None, "the last part returns it"
        return loss

    async def _anchor_of(self, state: TrainedState, part: Sequence[Slice]) -> list[Vector]:
        states = state.moving_states()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: [anchor_slice(self._plan, states, each) for each in part]
        )


class Evaluations:
    """Measures the held-out loss now and then, and reports it.

    Args:
        measure: returns the losses of the current state, or None if they are not measured.
        is_whole: returns whether this peer holds all spans.
    """

    def __init__(
        self,
        measure: Callable[[], Awaitable[HeldOutLoss | None]],
        engine: PeerEngine,
        reporter: StatusReporter,
        *,
        now: Callable[[], float],
        is_whole: Callable[[], bool],
    ) -> None:
        self._measure = measure
        self._engine = engine
        self._reporter = reporter
        self._now = now
        self._is_whole = is_whole

    async def run(self, pause_seconds: float) -> None:
        """Measure until cancelled, with a pause after each measurement."""
        while True:
            has_measured = await self.measure()
            await asyncio.sleep(pause_seconds if has_measured else LOOK_SECONDS)

    async def measure(self) -> bool:
        """Measure once, unless this peer is paused or lacks spans; return whether it did."""
        engine = self._engine
        if not engine.serves_state or not self._is_whole() or engine.membership.is_paused:
            return False
        measured = await self._measure()
        if measured is None:
            return False
        self._reporter.note(anchor_loss=measured.anchor, local_loss=measured.local)
        self._reporter.report(
            "evaluation",
            f"held-out loss {measured.anchor:.4f} (shared model), {measured.local:.4f} (own model)",
            anchor_loss=measured.anchor,
            local_loss=measured.local,
            round=engine.rules.clock.round_at(self._now()),
            tokens=engine.conditions.progress.tokens,
        )
        return True


def anchor_slice(plan: RunPlan, states: Mapping[SpanId, SpanState], wanted: Slice) -> Vector:
    """Return a copy of a slice of a fragment of φ; allocated outside the heap, so as not to displace a gradient."""
    pieces = []
    for span in plan.spans_of(wanted.fragment):
        place = plan.places[span]
        start, stop = max(place.start, wanted.start), min(place.stop, wanted.stop)
        if start < stop:
            pieces.append(states[span].anchor_N[start - place.start : stop - place.start])
    return np.concatenate(pieces, out=passing_vector(sum(map(len, pieces))))


async def _local_of(state: TrainedState, part: Sequence[Slice]) -> tuple[Vector, ...]:
    """Return slices of θ as they are at the next step border."""
    came: asyncio.Future[tuple[Vector, ...]] = asyncio.get_running_loop().create_future()
    state.look(part, lambda vectors: came.set_result(vectors) if not came.done() else None)
    return await came
