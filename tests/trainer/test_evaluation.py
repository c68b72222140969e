"""The held-out loss of what is agreed and of what this island alone has learnt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import HandDrivenIsland, small_corpus, small_plan, start_states

from p2p_diloco.island.evaluation import AnchorEvaluation
from p2p_diloco.outer.vector import Vector
from p2p_diloco.trainer.evaluation import HeldOutLoss, HeldOutWatch

PLAN = small_plan({"inner.learning_rate": 0.01})


def measured(folder: Path, num_steps: int) -> HeldOutLoss:
    corpus = small_corpus(folder)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    island.step(num_steps)

    async def scene() -> HeldOutLoss:
        watch = HeldOutWatch(PLAN, corpus)
        try:
            asyncio.get_running_loop().call_soon(island.settle)
            return await watch.measure(island.thread)
        finally:
            watch.close()

    return asyncio.run(scene())


def test_an_untrained_model_knows_nothing(tmp_path: Path) -> None:
    island = HandDrivenIsland(PLAN, small_corpus(tmp_path))
    island.hold(start_states(PLAN))
    assert island.thread.island.load()
    evaluation = AnchorEvaluation(PLAN.shape, PLAN.fragments, small_corpus(tmp_path))
    loss = evaluation.loss(island.thread.island.parameters.read_all())
    assert loss == pytest.approx(math.log(256), abs=1e-3)


def test_what_is_learnt_here_shows_in_the_local_loss_alone(tmp_path: Path) -> None:
    loss = measured(tmp_path, 30)
    assert loss.anchor == pytest.approx(math.log(256), abs=1e-3)
    assert loss.local < loss.anchor - 0.5


def test_a_measurement_that_is_given_up_takes_no_answer_afterwards(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    late: list[Callable[[], None]] = []

    async def scene() -> None:
        watch = HeldOutWatch(PLAN, corpus)
        task = asyncio.ensure_future(watch.measure(island.thread))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        late.append(island.settle)
        island.settle()  # hands the vectors to somebody who has gone
        watch.close()

    asyncio.run(scene())
    assert late


def test_vectors_are_put_together_in_the_order_of_spans(tmp_path: Path) -> None:
    watch = HeldOutWatch(PLAN, small_corpus(tmp_path))
    flat: tuple[Vector, ...] = watch._flat(start_states(PLAN))
    watch.close()
    assert [len(vector_N) for vector_N in flat] == [fragment.elements for fragment in PLAN.fragments]
