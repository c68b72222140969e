"""Held-out loss of the anchor and of θ, measured beside training in a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import Corpus
from p2p_diloco.island.evaluation import AnchorEvaluation
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.trainer.island_thread import IslandThread
from p2p_diloco.trainer.run_plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Nats per byte on the held-out text."""

    anchor: float
    local: float


class HeldOutWatch:
    """Measures both losses on one model instance of its own."""

    def __init__(self, plan: RunPlan, corpus: Corpus) -> None:
        self._plan = plan
        self._evaluation = AnchorEvaluation(plan.shape, plan.fragments, corpus)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")

    async def measure(self, island: IslandThread) -> HeldOutLoss:
        """Measure the island as it is now."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[tuple[Vector, ...]] = loop.create_future()
        island.look(lambda vectors: came.set_result(vectors) if not came.done() else None)
        local = await came
        anchor = await loop.run_in_executor(self._thread, self._evaluation.loss, self._flat(island.states()))
        return HeldOutLoss(anchor=anchor, local=await loop.run_in_executor(self._thread, self._evaluation.loss, local))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _flat(self, states: dict[SpanId, SpanState]) -> tuple[Vector, ...]:
        return tuple(
            np.concatenate([states[span].anchor_N for span in self._plan.spans_of(fragment.index)])
            for fragment in self._plan.fragments
        )
