"""An island by itself: what it does is in its diary, and one that does as the diary says holds the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import entry_payload, peer_key, small_corpus, small_plan, start_states, stream_of, update_of

from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import Corpus
from p2p_diloco.island.model import build_model
from p2p_diloco.outer.state import state_digest
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.diary import Diary, read_diary
from p2p_diloco.trainer.island import Island
from p2p_diloco.trainer.run_plan import RunPlan

PLAN = small_plan()
SPAN = SpanId(0, 0)


def island(corpus: Corpus, diary: Diary | None = None, plan: RunPlan = PLAN) -> Island:
    return Island(
        plan=plan,
        model=build_model(plan.shape, plan.manifest.model.seed),
        stream=stream_of(plan, corpus, peer_key("ada").peer),
        device=torch.device("cpu"),
        diary=diary,
    )


def update() -> SpanUpdate:
    elements = PLAN.rules.span_elements[SPAN]
    return update_of(SPAN, 0, entry_payload(PLAN, np.full(elements, 0.01, np.float32)))


def test_what_it_does_is_in_its_diary(tmp_path: Path) -> None:
    ada = island(small_corpus(tmp_path), Diary(tmp_path))
    assert not ada.load(), "no span is there yet"
    ada.states = start_states(PLAN)
    assert ada.load()
    ada.step()
    assert ada.contribute(0, 0) is not None
    assert ada.contribute(1, 0) is None, "nothing new"
    ada.step()
    ada.absorb(update())
    ada.take(SPAN, start_states(PLAN)[SPAN])
    lines = list(read_diary(tmp_path))
    assert [line["what"] for line in lines] == ["began", "loaded", "contributed", "absorbed", "took"]
    assert [line.get("steps") for line in lines[2:]] == [1, 2, 2]
    assert len(lines[1]["heads"]) == len(PLAN.places)


def test_the_same_events_after_the_same_steps_give_the_same_bytes(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    twins = [island(corpus), island(corpus)]
    for twin in twins:
        twin.states = start_states(PLAN)
        twin.load()
        twin.step()
        twin.contribute(0, 0)
        twin.step()
        twin.absorb(update())
    first, second = twins
    for one, other in zip(first.parameters.read_all(), second.parameters.read_all(), strict=True):
        assert np.array_equal(one, other)
    digests = {state_digest([twin.states[span] for span in sorted(twin.states)]) for twin in twins}
    assert len(digests) == 1


def test_whoever_comes_late_goes_by_the_schedule_where_the_run_stands(tmp_path: Path) -> None:
    cosine = {"inner.schedule": "cosine", "inner.warmup_steps": 0, "rounds.planned_cycles": 10}
    plan = small_plan(cosine)
    peak, last = plan.inner.learning_rate, plan.inner.learning_rate * plan.inner.final_share
    late = island(small_corpus(tmp_path), plan=plan)
    for span, state in start_states(plan).items():
        late.take(span, replace(state, head=replace(state.head, height=5)))
    assert late.load()
    assert late.loop.learning_rate == pytest.approx((peak + last) / 2)
    for span, state in late.states.items():
        late.take(span, replace(state, head=replace(state.head, height=10)))
    assert late.loop.learning_rate == pytest.approx(last)
