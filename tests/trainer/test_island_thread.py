"""The island: what it contributes, how it absorbs, what its thread promises."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_run import (
    HandDrivenIsland,
    entry_payload,
    peer_key,
    small_corpus,
    small_plan,
    start_states,
    stream_of,
    update_of,
)

from p2p_diloco.errors import ConfigError, NonFiniteUpdate
from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import Corpus
from p2p_diloco.island.evaluation import Slice
from p2p_diloco.island.model import build_model
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.protocol.round import FragmentContribution
from p2p_diloco.swarm import known_answer
from p2p_diloco.trainer.island import Island
from p2p_diloco.trainer.island_thread import IslandThread
from p2p_diloco.trainer.run_plan import RunPlan

PLAN = small_plan()
EXACT = small_plan({"codec.contribution": "float32", "codec.entry": "float32", "codec.entry_rounding": "nearest"})
SPAN = SpanId(0, 0)
PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_corpus(tmp_path_factory.mktemp("text"))


def island_at_start(corpus: Corpus, plan: RunPlan = PLAN, name: str = "ada") -> HandDrivenIsland:
    island = HandDrivenIsland(plan, corpus, name=name)
    island.hold(start_states(plan))
    return island


def digest(states: dict[SpanId, SpanState]) -> bytes:
    return state_digest([states[span] for span in sorted(states)])


def absorb_alone(island: HandDrivenIsland, contribution: FragmentContribution, radius: float = 1e6) -> None:
    """Let the island absorb entries that hold its own contribution and nothing else."""
    codec = island.plan.codecs
    for part in contribution.spans:
        vector_N = codec.contribution.decode(part.payload, island.plan.rules.span_elements[part.span])
        update = update_of(part.span, contribution.round, entry_payload(island.plan, vector_N), radius=radius)
        island.thread.apply(update)
    island.settle()


# -- contributing


def test_a_contribution_has_every_span_of_its_fragment(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(3)
    contribution = island.contribute(round_index=0)
    assert (contribution.round, contribution.fragment, contribution.steps) == (0, 0, 3)
    assert contribution.tokens == 3 * PLAN.inner.batch * PLAN.shape.context
    assert tuple(part.span for part in contribution.spans) == PLAN.spans_of(0)
    for part in contribution.spans:
        assert len(part.payload) == PLAN.rules.payload_bytes[part.span]
        assert part.parent == start_states(PLAN)[part.span].head.digest


def test_what_is_sent_and_what_is_kept_is_all_that_was_learnt(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(3)
    learnt = {span: island.residual(span) for span in PLAN.spans_of(0)}
    contribution = island.contribute(round_index=0)
    for part in contribution.spans:
        sent_N = PLAN.codecs.contribution.decode(part.payload, len(learnt[part.span]))
        np.testing.assert_allclose(island.residual(part.span) + sent_N, learnt[part.span], atol=1e-6)


def test_an_exact_codec_leaves_nothing_behind(corpus: Corpus) -> None:
    island = island_at_start(corpus, EXACT)
    island.step(2)
    island.contribute(round_index=0)
    assert all(np.abs(island.residual(span)).max() < 1e-6 for span in EXACT.spans_of(0))
    assert all(np.abs(island.residual(span)).max() > 1e-5 for span in EXACT.spans_of(1))


def test_without_steps_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    assert island.contribute(round_index=0) is None
    island.step(1)
    assert island.contribute(round_index=0) is not None
    assert island.contribute(round_index=2) is None


def test_before_all_spans_are_held_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    states = start_states(PLAN)
    missing = states.pop(SpanId(1, 0))
    island.hold(states)
    assert not island.thread.island.load()
    assert island.contribute(round_index=0) is None
    island.hold({SpanId(1, 0): missing})
    assert island.thread.island.load()


def test_after_the_deadline_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    assert island.contribute(round_index=0, deadline=island.now - 0.1) is None
    assert island.contribute(round_index=0, deadline=island.now).steps == 1


def test_steps_are_counted_from_the_last_contribution_of_the_fragment(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(2)
    island.contribute(round_index=0, fragment=0)
    island.step(3)
    assert island.contribute(round_index=1, fragment=1).steps == 5
    assert island.contribute(round_index=2, fragment=0).steps == 3


def test_a_round_whose_entry_is_held_gets_no_contribution(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    zeros = np.zeros(PLAN.rules.span_elements[SPAN], np.float32)
    island.thread.apply(update_of(SPAN, 2, entry_payload(PLAN, zeros)))
    late = island.contribute(round_index=2)
    assert {part.span for part in late.spans} == set(PLAN.spans_of(0)) - {SPAN}


def test_a_round_is_contributed_to_once(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    island.contribute(round_index=2)
    island.step(1)
    assert island.contribute(round_index=2).spans == ()


def test_contributions_are_clipped_to_the_published_radius(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(5)
    first = island.contribute(round_index=0)
    radius = max(part.norm for part in first.spans) / 1000
    absorb_alone(island, first, radius=radius)
    island.step(5)
    second = island.contribute(round_index=2)
    limit = PLAN.manifest.limits.kappa * radius
    assert max(part.norm for part in second.spans) > limit, "norms travel as they were before clipping"
    for part in second.spans:
        elements = PLAN.rules.span_elements[part.span]
        assert PLAN.codecs.contribution.squared_norm(part.payload, elements) ** 0.5 <= limit * (1 + 1e-6)


def test_a_diverged_island_contributes_nothing_of_the_broken_span(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    place = PLAN.places[SPAN]
    island.thread.island.parameters.write(
        0, place.start, place.stop, np.full(place.stop - place.start, np.nan, np.float32)
    )
    assert SPAN not in {part.span for part in island.contribute(round_index=0).spans}


def test_no_more_than_the_limit_stays_in_flight(corpus: Corpus) -> None:
    plan = small_plan({"limits.in_flight": 2})
    island = island_at_start(corpus, plan)
    for round_index in (0, 2, 4, 6):
        island.step(1)
        island.contribute(round_index)
        assert len(island.in_flight(SPAN)) <= 2


# -- absorbing


def test_an_own_entry_resolves_the_contribution_and_keeps_the_residual(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(4)
    contribution = island.contribute(round_index=0)
    island.step(2)
    kept = {span: island.residual(span) for span in PLAN.spans_of(0)}
    absorb_alone(island, contribution)
    for span, residual_N in kept.items():
        assert island.in_flight(span) == ()
        np.testing.assert_allclose(island.residual(span), residual_N, atol=1e-5)
    state = island.thread.span_state(SPAN)
    assert state is not None
    assert (state.head.round, state.head.height) == (0, 1)


def test_peers_with_equal_entries_hold_equal_bytes(corpus: Corpus) -> None:
    ada, ben = island_at_start(corpus), island_at_start(corpus, name="ben")
    archive = HandDrivenIsland(PLAN, corpus, name="cleo")
    archive.hold(start_states(PLAN))
    ada.step(3)
    ben.step(5)
    for round_index in (0, 1, 2):
        contribution = ada.contribute(round_index, fragment=round_index % 2)
        for peer in (ada, ben, archive):
            absorb_alone(peer, contribution)
        ada.step(1)
    assert len({digest(peer.thread.states()) for peer in (ada, ben, archive)}) == 1
    assert not np.array_equal(ada.local(SPAN), ben.local(SPAN)), "each keeps what it alone has learnt"


def test_progress_of_the_run_reaches_the_inner_schedule(corpus: Corpus) -> None:
    plan = small_plan({"inner.schedule": "cosine", "rounds.planned_cycles": 1, "inner.final_share": 0.0})
    island = island_at_start(corpus, plan)
    island.step(1)
    for round_index in (0, 1):
        absorb_alone(island, island.contribute(round_index, fragment=round_index))
        island.step(1)
    assert island.thread.island.loop.learning_rate < plan.inner.learning_rate / 100


def test_a_replaced_span_counts_what_is_in_flight_as_included(corpus: Corpus) -> None:
    island = island_at_start(corpus, EXACT)
    island.step(3)
    island.contribute(round_index=0)
    state = start_states(EXACT)[SPAN]
    moved = SpanState(
        head=replace(state.head, round=6, height=3),
        anchor_N=state.anchor_N + np.float32(0.5),
        momentum_N=np.ones_like(state.anchor_N),
    )
    island.hold({SPAN: moved})
    assert island.in_flight(SPAN) == ()
    assert island.thread.span_state(SPAN) is moved
    assert np.abs(island.residual(SPAN)).max() < 1e-5


def test_local_parameters_begin_at_the_anchor(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    states = {
        span: SpanState(head=s.head, anchor_N=s.anchor_N + np.float32(1), momentum_N=s.momentum_N.copy())
        for span, s in start_states(PLAN).items()
    }
    island.hold(states)
    assert island.thread.island.load()
    assert all(np.array_equal(island.local(span), state.anchor_N) for span, state in states.items())


def test_a_look_is_a_copy_of_the_local_parameters(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    seen: list[Any] = []
    island.thread.look([Slice(1, 0, 100), Slice(0, 7, 9)], seen.append)
    island.settle()
    before = [vector_N.copy() for vector_N in seen[0]]
    assert np.array_equal(before[0], island.thread.island.parameters.read(1, 0, 100))
    island.step(1)
    assert [len(vector_N) for vector_N in seen[0]] == [100, 2]
    assert all(np.array_equal(one, other) for one, other in zip(before, seen[0], strict=True))


# -- progress


def test_progress_tells_steps_tokens_and_a_smooth_loss(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    assert island.thread.progress().steps == 0
    island.step(1)
    first = island.thread.progress()
    assert first.loss == pytest.approx(np.log(256), rel=0.05)
    island.step(4)
    later = island.thread.progress()
    assert (later.steps, later.tokens) == (5, 5 * PLAN.inner.batch * PLAN.shape.context)
    assert later.loss < first.loss


def test_a_step_that_was_not_applied_leaves_progress_as_it_was(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    before = island.thread.progress()
    island.thread.island.loop.model.norm.gain.data.fill_(float("nan"))
    island.step(1)
    assert island.thread.progress() == before


# -- the thread


class Desk:
    """Stands for the event loop: what the thread hands over is done by the test, when it asks."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.deaths: list[BaseException] = []

    def hand_over(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def do_one(self) -> None:
        self._calls.get(timeout=PATIENCE_SECONDS)()


def started(corpus: Corpus, desk: Desk, stream: Any = None) -> IslandThread:
    island = Island(
        plan=PLAN,
        model=build_model(PLAN.shape, 0),
        stream=stream if stream is not None else stream_of(PLAN, corpus, peer_key("ada").peer),
        device=torch.device("cpu"),
    )
    thread = IslandThread(island=island, now=lambda: 0.0, in_loop=desk.hand_over, died=desk.deaths.append)
    thread.start()
    return thread


def hold_start(thread: IslandThread) -> None:
    for span, state in start_states(PLAN).items():
        thread.replace(span, state)


def test_the_thread_trains_answers_and_ends_when_told(corpus: Corpus) -> None:
    desk, answers = Desk(), queue.Queue[Any]()
    thread = started(corpus, desk)
    hold_start(thread)
    contribution = None
    for round_index in range(0, 10_000, 2):
        thread.take_snapshot(round_index, 0, float("inf"), answers.put)
        desk.do_one()
        contribution = answers.get_nowait()
        if contribution is not None:
            break
    assert contribution is not None
    assert thread.progress().steps >= contribution.steps > 0
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)


def test_what_was_handed_over_is_done_before_the_thread_ends(corpus: Corpus) -> None:
    thread = started(corpus, Desk())
    hold_start(thread)
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)
    assert set(thread.states()) == set(PLAN.places)


def test_waiting_until_idle_ends_with_nothing_left_to_do(corpus: Corpus) -> None:
    thread = started(corpus, Desk())
    hold_start(thread)
    thread.wait_until_idle()
    assert set(thread.states()) == set(PLAN.places)
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)
    hold_start(thread)
    thread.wait_until_idle()  # nobody is there to do it any more, so there is nothing to wait for


def test_without_training_entries_are_still_absorbed(corpus: Corpus) -> None:
    thread = started(corpus, Desk())
    thread.stop_training()
    hold_start(thread)
    zeros = np.zeros(PLAN.rules.span_elements[SPAN], np.float32)
    thread.apply(update_of(SPAN, 0, entry_payload(PLAN, zeros)))
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)
    state = thread.span_state(SPAN)
    assert state is not None
    assert state.head.height == 1
    assert thread.progress().steps == 0


class BrokenStream:
    """A disk that fails in the middle of training."""

    context = PLAN.shape.context

    def next_batch(self) -> torch.Tensor:
        raise OSError("the disk is gone")


def test_a_thread_that_dies_says_why_in_the_loop(corpus: Corpus) -> None:
    desk = Desk()
    thread = started(corpus, desk, BrokenStream())
    hold_start(thread)
    desk.do_one()
    assert [str(error) for error in desk.deaths] == ["the disk is gone"]
    assert thread.join(PATIENCE_SECONDS)


def test_a_thread_goes_on_until_told_and_one_that_never_began_need_not_be_waited_for(corpus: Corpus) -> None:
    thread = started(corpus, Desk())
    assert not thread.join(0.0)
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)
    assert island_at_start(corpus).thread.join(0.0)


# -- damaged memory


def spoil(island: HandDrivenIsland, span: SpanId) -> None:
    """Put an infinite number into a span's anchor, as a bit that flips does."""
    state = island.thread.island.states[span]
    anchor_N = state.anchor_N.copy()
    anchor_N[5] = np.inf
    island.thread.island.states[span] = replace(state, anchor_N=anchor_N)


def half_of(span: SpanId, round_index: int = 0) -> Any:
    vector_N = np.full(PLAN.rules.span_elements[span], 0.5, np.float32)
    return update_of(span, round_index, entry_payload(PLAN, vector_N))


def test_a_span_that_cannot_follow_an_entry_stands_still_until_it_is_replaced_and_training_goes_on(
    corpus: Corpus,
) -> None:
    island = island_at_start(corpus)
    told: list[tuple[SpanId, str]] = []
    island.thread._damaged = lambda span, reason: told.append((span, reason))
    island.step(2)
    spoil(island, SPAN)
    for round_index in (0, 2):
        island.thread.apply(half_of(SPAN, round_index))
    island.settle()
    assert [span for span, _ in told] == [SPAN], "told once"
    assert "non-finite numbers" in told[0][1]
    assert island.thread.span_state(SPAN) is None, "nobody is given what is damaged"
    assert dict(island.thread.moving_states()) == {}, "no checkpoint is made of it"
    island.step(2)
    contributed = island.contribute(round_index=4)
    assert SPAN not in [part.span for part in contributed.spans]
    assert len(contributed.spans) == len(PLAN.spans_of(0)) - 1
    sound = start_states(PLAN)[SPAN]
    island.hold({SPAN: sound})
    assert island.thread.span_state(SPAN) is sound
    assert np.array_equal(island.local(SPAN), sound.anchor_N), "no number follows from one that is damaged"
    island.thread.apply(half_of(SPAN))
    island.settle()
    now = island.thread.span_state(SPAN)
    assert now is not None
    assert now.head.height == 1
    island.step(1)
    assert np.isfinite(island.thread.progress().loss)
    assert len(island.contribute(round_index=6).spans) == len(PLAN.spans_of(0))
    assert island.failures == []


def test_of_chosen_spans_those_that_are_damaged_are_left_out(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.thread._damaged = lambda span, reason: None
    island.step(1)
    spoil(island, SPAN)
    island.thread.apply(half_of(SPAN))
    answers: list[Any] = []
    island.thread.take_snapshot(0, 0, float("inf"), answers.append, frozenset(PLAN.spans_of(0)[:2]))
    island.settle()
    assert [part.span for part in answers[0].spans] == [PLAN.spans_of(0)[1]]


def test_without_anybody_to_put_it_right_a_damaged_span_ends_training(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    spoil(island, SPAN)
    island.thread.apply(half_of(SPAN))
    with pytest.raises(NonFiniteUpdate):
        island.settle()


def test_a_thread_that_makes_other_bytes_says_so_before_it_follows_anything(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_answer, "KNOWN_ANSWER", "of another machine")
    desk = Desk()
    thread = started(corpus, desk)
    desk.do_one()
    assert isinstance(desk.deaths[0], ConfigError)
    assert thread.join(PATIENCE_SECONDS)
