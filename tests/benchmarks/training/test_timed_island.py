"""A bench paces islands: they rest, and a blocking one waits for the entries of its round, but not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.training.our_run import RunShape, plan_shape
from benchmarks.training.timed_island import BlockingThread, PacedThread, TimedState
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.data import Corpus, open_corpus
from p2p_diloco.app.text.run_text import open_stream
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.span_log import AbsorbedEntry

SHAPE = RunShape(codec="int4", fragments=2, spans_per_fragment=2, model="tiny")
PLAN = plan_shape(SHAPE, 20.0)
CLOCK = PLAN.rules.clock
ROSTER = sha256(b"a roster")


OPEN: list[TimedState] = []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 400)
    return open_corpus(text)


class Stage:
    """A thread that is never started: the test does its steps."""

    def __init__(self, thread_class: type[PacedThread], corpus: Corpus) -> None:
        self.now = CLOCK.begin(0)
        self.failures: list[object] = []
        stream = open_stream(corpus, PLAN, PeerId(bytes(32)), 1)
        model = build_model(PLAN.shape, 0)
        loop = InnerLoop(model, stream, PLAN.inner, "cpu")
        local = LocalSpans(PLAN, LocalParameters(model, PLAN.fragments))
        around: dict[str, Any] = {"in_loop": lambda call: call(), "died": self.failures.append}
        host = StateHost(
            plan=PLAN, now=lambda: self.now, damaged=lambda span, reason: self.failures.append(span), **around
        )
        self.state = TimedState(host, local)
        self.state.hold({span: genesis_state(anchor_N, ROSTER) for span, anchor_N in make_start(PLAN).items()})
        OPEN.append(self.state)
        assert self.state.begin()
        self.thread = thread_class(loop=loop, state=self.state, clock=CLOCK, now=lambda: self.now)
        self.thread.rests = False

    def follow(self, index: int, round_index: int = 0, *, own_included: bool = True) -> None:
        span = SpanId(0, index)
        payload = PLAN.codecs.entry.encode(np.zeros(PLAN.rules.span_elements[span], np.float32))
        absorbed = AbsorbedEntry(
            digest=sha256(b"entry", bytes([index])), round=round_index, roster=ROSTER, radius=1e6, median_weight=1.0
        )
        self.state.apply(SpanUpdate(span=span, absorbed=absorbed, payload=payload, own_included=own_included))
        self.state.wait_until_idle()
        self.state.border()
        assert self.failures == []


def test_what_happens_to_an_island_is_noted(corpus: Corpus) -> None:
    stage = Stage(PacedThread, corpus)
    timings, state = stage.state.timings, stage.state
    stage.thread.step()
    stage.thread.step()
    assert len(timings.borders) == 2
    assert timings.borders[0] < timings.borders[1]
    assert state.contribute(0, 0) is not None
    assert state.contribute(0, 0) is None, "nothing new"
    assert (timings.awaited, timings.awaited_round) == ({SpanId(0, 0), SpanId(0, 1)}, 0)
    stage.follow(0)
    stage.follow(1, own_included=False)
    assert timings.awaited == set()
    assert timings.included[0] == 1
    assert timings.followed_at[0] > timings.borders[1]
    assert state.outer_seconds > 0.0


@pytest.mark.parametrize("thread_class", [PacedThread, BlockingThread])
def test_an_island_that_rests_makes_no_step(thread_class: type[PacedThread], corpus: Corpus) -> None:
    thread = Stage(thread_class, corpus).thread
    assert thread.may_step()
    thread.rests = True
    assert not thread.may_step()


def contributed(thread_class: type[PacedThread], corpus: Corpus) -> Stage:
    stage = Stage(thread_class, corpus)
    stage.thread.exchanges = True
    stage.thread.step()
    assert stage.state.contribute(0, 0) is not None
    return stage


def test_one_that_does_not_block_trains_on(corpus: Corpus) -> None:
    assert contributed(PacedThread, corpus).thread.may_step()


def test_a_blocking_one_waits_until_all_entries_of_its_round_are_followed(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    assert not stage.thread.may_step()
    stage.follow(0)
    assert not stage.thread.may_step()
    stage.follow(1)
    assert stage.thread.may_step()


def test_an_entry_of_another_round_is_not_what_it_waits_for(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    stage.follow(0, round_index=2)
    stage.follow(1)
    assert not stage.thread.may_step()


def test_a_blocking_one_waits_no_longer_than_its_round_lasts_or_the_exchange(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    stage.now = CLOCK.begin(1) - 0.001
    assert not stage.thread.may_step()
    stage.now = CLOCK.begin(1)
    assert stage.thread.may_step()
    stage.now = CLOCK.begin(0)
    stage.thread.exchanges = False
    assert stage.thread.may_step()
