"""A bench paces islands: they rest, and a blocking one waits for the entries of its round, but not for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2p_diloco.bench.training.our_run import RunShape, draft_run
from p2p_diloco.bench.training.timed_island import BlockingThread, PacedThread, TimedIsland
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.island.data import Corpus, open_corpus
from p2p_diloco.island.model import build_model
from p2p_diloco.outer.state import AbsorbedEntry, genesis_state
from p2p_diloco.signing import SigningKey
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.founding import make_start
from p2p_diloco.trainer.run_plan import plan_run
from p2p_diloco.trainer.run_text import open_stream

SHAPE = RunShape(codec="int4", fragments=2, spans_per_fragment=2, model="tiny")
PLAN = plan_run(draft_run(SHAPE, cycle_seconds=20.0, organiser=SigningKey(bytes(32)), now_seconds=1.0))
CLOCK = PLAN.rules.clock
ROSTER = sha256(b"a roster")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 400)
    return open_corpus(text)


class Stage:
    """A thread that is never started: the test does its steps."""

    def __init__(self, thread_class: type[PacedThread], corpus: Corpus) -> None:
        self.now = CLOCK.begin(0)
        stream = open_stream(corpus, PLAN, PLAN.rules.run, PeerId(bytes(32)), 1)
        self.island = TimedIsland(plan=PLAN, model=build_model(PLAN.shape, 0), stream=stream)
        for span, anchor_N in make_start(PLAN).items():
            self.island.take(span, genesis_state(anchor_N, ROSTER))
        assert self.island.load()
        self.thread = thread_class(
            island=self.island,
            clock=CLOCK,
            now=lambda: self.now,
            in_loop=lambda call: call(),
            died=lambda error: None,
        )
        self.thread.rests = False

    def follow(self, index: int, round_index: int = 0, *, own_included: bool = True) -> None:
        span = SpanId(0, index)
        payload = PLAN.codecs.entry.encode(np.zeros(PLAN.rules.span_elements[span], np.float32))
        absorbed = AbsorbedEntry(
            digest=sha256(b"entry", bytes([index])), round=round_index, roster=ROSTER, radius=1e6, median_weight=1.0
        )
        self.island.absorb(SpanUpdate(span=span, absorbed=absorbed, payload=payload, own_included=own_included))


def test_what_happens_to_an_island_is_noted(corpus: Corpus) -> None:
    island = (stage := Stage(PacedThread, corpus)).island
    island.step()
    island.step()
    assert len(island.borders) == 2
    assert island.borders[0] < island.borders[1]
    assert island.contribute(0, 0) is not None
    assert island.contribute(0, 0) is None, "nothing new"
    assert (island.awaited, island.awaited_round) == ({SpanId(0, 0), SpanId(0, 1)}, 0)
    stage.follow(0)
    stage.follow(1, own_included=False)
    assert island.awaited == set()
    assert island.included[0] == 1
    assert island.followed_at[0] > island.borders[1]
    assert island.outer_seconds > 0.0


@pytest.mark.parametrize("thread_class", [PacedThread, BlockingThread])
def test_an_island_that_rests_makes_no_step(thread_class: type[PacedThread], corpus: Corpus) -> None:
    thread = Stage(thread_class, corpus).thread
    assert thread._may_step()
    thread.rests = True
    assert not thread._may_step()


def contributed(thread_class: type[PacedThread], corpus: Corpus) -> Stage:
    stage = Stage(thread_class, corpus)
    stage.thread.exchanges = True
    stage.island.step()
    assert stage.island.contribute(0, 0) is not None
    return stage


def test_one_that_does_not_block_trains_on(corpus: Corpus) -> None:
    assert contributed(PacedThread, corpus).thread._may_step()


def test_a_blocking_one_waits_until_all_entries_of_its_round_are_followed(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    assert not stage.thread._may_step()
    stage.follow(0)
    assert not stage.thread._may_step()
    stage.follow(1)
    assert stage.thread._may_step()


def test_an_entry_of_another_round_is_not_what_it_waits_for(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    stage.follow(0, round_index=2)
    stage.follow(1)
    assert not stage.thread._may_step()


def test_a_blocking_one_waits_no_longer_than_its_round_lasts_or_the_exchange(corpus: Corpus) -> None:
    stage = contributed(BlockingThread, corpus)
    stage.now = CLOCK.begin(1) - 0.001
    assert not stage.thread._may_step()
    stage.now = CLOCK.begin(1)
    assert stage.thread._may_step()
    stage.now = CLOCK.begin(0)
    stage.thread.exchanges = False
    assert stage.thread._may_step()
