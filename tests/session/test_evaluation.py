"""Held-out losses of the agreed model and of this island's local parameters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from small_run import HandDrivenIsland, small_corpus, small_plan, start_states

from p2p_diloco.app.models.evaluation import AnchorEvaluation, HeldOutWatch
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.session.held_state import Slice, anchor_slice
from p2p_diloco.session.training import HeldOutLoss

PLAN = small_plan({"inner.learning_rate": 0.01})


async def settle_again_and_again(island: HandDrivenIsland) -> None:
    while True:
        island.settle()
        await asyncio.sleep(0)


def measured(folder: Path, num_steps: int) -> HeldOutLoss:
    corpus = small_corpus(folder)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    island.step(num_steps)

    async def scene() -> HeldOutLoss:
        watch = HeldOutWatch(PLAN, AnchorEvaluation(PLAN.shape, PLAN.fragments, corpus))
        settling = asyncio.ensure_future(settle_again_and_again(island))
        try:
            return await watch.measure(island.state)
        finally:
            settling.cancel()
            watch.close()

    return asyncio.run(scene())


def test_an_untrained_model_predicts_all_bytes_equally(tmp_path: Path) -> None:
    island = HandDrivenIsland(PLAN, small_corpus(tmp_path))
    island.hold(start_states(PLAN))
    assert island.state.begin()
    evaluation = AnchorEvaluation(PLAN.shape, PLAN.fragments, small_corpus(tmp_path))
    loss = evaluation.loss(island.parameters.read_all())
    assert loss == pytest.approx(math.log(256), abs=1e-3)


def test_local_learning_changes_only_the_local_loss(tmp_path: Path) -> None:
    loss = measured(tmp_path, 30)
    assert loss.anchor == pytest.approx(math.log(256), abs=1e-3)
    assert loss.local < loss.anchor - 0.5


def test_a_cancelled_measurement_ignores_late_answers(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    late: list[Sequence[Slice]] = []
    look = island.state.look

    def note(slices: Sequence[Slice], hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        late.append(slices)
        look(slices, hand_over)

    island.state.look = note  # type: ignore[method-assign]

    async def scene() -> None:
        watch = HeldOutWatch(PLAN, AnchorEvaluation(PLAN.shape, PLAN.fragments, corpus))
        task = asyncio.ensure_future(watch.measure(island.state))
        while not late:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        island.settle()  # hands the vectors to the cancelled measurement
        watch.close()

    asyncio.run(scene())
    assert len(late) == 1


def test_concurrent_measurements_do_not_mix(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    island.step(3)

    async def scene() -> None:
        watch = HeldOutWatch(PLAN, AnchorEvaluation(PLAN.shape, PLAN.fragments, corpus))
        settling = asyncio.ensure_future(settle_again_and_again(island))
        try:
            alone = await watch.measure(island.state)
            given_up = asyncio.ensure_future(watch.measure(island.state))
            for _ in range(20):
                await asyncio.sleep(0)
            await asyncio.sleep(0.005)
            given_up.cancel()
            assert await asyncio.gather(*(watch.measure(island.state) for _ in range(3))) == [alone] * 3
        finally:
            settling.cancel()
            watch.close()

    asyncio.run(scene())


def test_a_slice_of_the_anchor_is_assembled_from_spans() -> None:
    states = start_states(PLAN)
    for fragment in PLAN.fragments:
        whole_N = np.concatenate([states[span].anchor_N for span in PLAN.spans_of(fragment.index)])
        assert len(whole_N) == fragment.elements
        for start, stop in ((0, fragment.elements), (1, 2), (63, 65), (fragment.elements - 1, fragment.elements)):
            slice_N = anchor_slice(PLAN, states, Slice(fragment.index, start, stop))
            assert np.array_equal(slice_N, whole_N[start:stop])
            assert slice_N.flags.owndata


def test_one_part_is_requested_at_a_time(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    island.step(1)
    asked: list[int] = []
    look = island.state.look

    def note(slices: Sequence[Slice], hand_over: Callable[[tuple[Vector, ...]], None]) -> None:
        asked.append(sum(each.stop - each.start for each in slices))
        look(slices, hand_over)
        asyncio.get_running_loop().call_soon(island.settle)

    island.state.look = note  # type: ignore[method-assign]

    async def scene() -> None:
        watch = HeldOutWatch(PLAN, AnchorEvaluation(PLAN.shape, PLAN.fragments, corpus))
        try:
            await watch.measure(island.state)
        finally:
            watch.close()

    asyncio.run(scene())
    assert sum(asked) == PLAN.num_parameters
    assert len(asked) == PLAN.shape.layers + 2
