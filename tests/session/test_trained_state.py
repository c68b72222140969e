"""A peer that trains: its contributions, and how φ, m and θ follow entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_run import (
    HandDrivenIsland,
    entry_payload,
    small_corpus,
    small_plan,
    start_states,
    update_of,
)

from p2p_diloco.app.text.data import Corpus
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import MAX_IN_FLIGHT, MOST_LEFT, PATIENT_FOR, SpanState, state_digest
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.session import trained_state
from p2p_diloco.session.held_state import Slice
from p2p_diloco.storage.trace import Trace
from research.trace import read_trace

PLAN = small_plan()
EXACT = small_plan({"codec.contribution": "float32", "codec.entry": "float32"})
SPAN = SpanId(0, 0)


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
    """Let the island absorb entries that hold only its own contribution."""
    codec = island.plan.codecs
    for part in contribution.spans:
        vector_N = codec.contribution.decode(part.payload, island.plan.rules.span_elements[part.span])
        update = update_of(part.span, contribution.round, entry_payload(island.plan, vector_N), radius=radius)
        island.state.apply(update)
    island.settle()


def half_of(span: SpanId, round_index: int = 0, plan: RunPlan = PLAN) -> Any:
    vector_N = np.full(plan.rules.span_elements[span], 0.5, np.float32)
    return update_of(span, round_index, entry_payload(plan, vector_N))


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


def test_what_is_sent_and_what_is_kept_add_up_to_what_was_learnt(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(3)
    learnt = {span: island.residual(span) for span in PLAN.spans_of(0)}
    contribution = island.contribute(round_index=0)
    for part in contribution.spans:
        sent_N = PLAN.codecs.contribution.decode(part.payload, len(learnt[part.span]))
        np.testing.assert_allclose(island.residual(part.span) + sent_N, learnt[part.span], atol=1e-6)


def test_an_exact_codec_leaves_no_residual(corpus: Corpus) -> None:
    island = island_at_start(corpus, EXACT)
    island.step(2)
    island.contribute(round_index=0)
    assert all(np.abs(island.residual(span)).max() < 1e-6 for span in EXACT.spans_of(0))
    assert all(np.abs(island.residual(span)).max() > 1e-5 for span in EXACT.spans_of(1))


def test_without_new_steps_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    assert island.contribute(round_index=0) is None
    island.step(1)
    assert island.contribute(round_index=0) is not None
    assert island.contribute(round_index=2) is None


def test_until_all_spans_are_held_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    states = start_states(PLAN)
    missing = states.pop(SpanId(1, 0))
    island.hold(states)
    assert not island.state.begin()
    assert island.contribute(round_index=0) is None
    island.hold({SpanId(1, 0): missing})
    assert island.state.begin()


def test_after_the_deadline_there_is_nothing_to_contribute(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    assert island.contribute(round_index=0, deadline=island.now - 0.1) is None
    assert island.contribute(round_index=0, deadline=island.now).steps == 1


def test_steps_are_counted_since_the_last_contribution_of_the_fragment(corpus: Corpus) -> None:
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
    island.state.apply(update_of(SPAN, 2, entry_payload(PLAN, zeros)))
    late = island.contribute(round_index=2)
    assert {part.span for part in late.spans} == set(PLAN.spans_of(0)) - {SPAN}


def test_each_round_gets_one_contribution(corpus: Corpus) -> None:
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
    limit = PLAN.rules.contribution_limit * radius
    assert max(part.norm for part in second.spans) > limit, "norms are sent as they were before clipping"
    for part in second.spans:
        elements = PLAN.rules.span_elements[part.span]
        assert PLAN.codecs.contribution.squared_norm(part.payload, elements) ** 0.5 <= limit * (1 + 1e-6)


def clipped_often(island: HandDrivenIsland, *, times: int, radius: float = 1e-5) -> None:
    """Let contributions of fragment 0 be far too long, and follow their entries."""
    for round_index in range(0, 2 * times, 2):
        island.step(1)
        absorb_alone(island, island.contribute(round_index), radius=radius)


def test_what_cannot_be_sent_for_long_is_given_up(corpus: Corpus) -> None:
    island, limit = island_at_start(corpus), PLAN.rules.contribution_limit * 1e-5
    clipped_often(island, times=PATIENT_FOR + 1)
    assert np.linalg.norm(island.residual(SPAN)) > 100 * MOST_LEFT * limit
    assert island.state.progress().length_given_up == 0.0
    anchor_N = island.state.states()[SPAN].anchor_N
    island.step(1)
    sent = island.contribute(2 * PATIENT_FOR + 2)
    assert sent.spans[0].norm > 100 * MOST_LEFT * limit, "the norm before clipping is sent, as always"
    assert np.linalg.norm(island.residual(SPAN)) == pytest.approx(MOST_LEFT * limit, rel=0.05)
    assert island.state.states()[SPAN].anchor_N is anchor_N
    absorb_alone(island, sent, radius=1e-5)
    assert np.linalg.norm(island.residual(SPAN)) == pytest.approx(MOST_LEFT * limit, rel=0.05)
    progress = island.state.progress()
    assert 0.0 < progress.length_sent < 0.1 * progress.length_learnt < progress.length_given_up


def test_what_a_blend_drops_from_theta_is_not_left_to_be_sent(corpus: Corpus) -> None:
    plan = small_plan({"outer.merge": "blend", "outer.fragment_update_alpha": 0.0})
    island, norms = island_at_start(corpus, plan), []
    for round_index in (0, 2, 4):
        island.step(1)
        sent = island.contribute(round_index)
        norms += [part.norm for part in sent.spans]
        absorb_alone(island, sent, radius=1e-5)
    assert island.state.progress().length_learnt == pytest.approx(sum(norms)), "each begins at the anchor"


def test_lengths_learnt_and_sent_are_equal_while_nothing_is_clipped(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    for round_index in range(40):
        island.step(1)
        absorb_alone(island, island.contribute(round_index, fragment=round_index % 2))
    progress = island.state.progress()
    assert progress.length_learnt == progress.length_sent > progress.length_given_up == 0.0


def test_an_island_that_begins_again_has_nothing_left_to_give_up(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    clipped_often(island, times=PATIENT_FOR + 1)
    island.state.begin_again("as a test asks")
    island.state.border()
    island.step(1)
    island.contribute(2 * PATIENT_FOR + 2)
    assert island.state.progress().length_given_up == 0.0


def test_a_diverged_island_contributes_nothing_of_the_broken_span(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    place = PLAN.places[SPAN]
    island.parameters.write(0, place.start, place.stop, np.full(place.stop - place.start, np.nan, np.float32))
    assert SPAN not in {part.span for part in island.contribute(round_index=0).spans}


def test_contributions_in_flight_are_limited(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    for round_index in range(0, 2 * MAX_IN_FLIGHT + 4, 2):
        island.step(1)
        island.contribute(round_index)
        assert len(island.in_flight(SPAN)) <= MAX_IN_FLIGHT
    assert len(island.in_flight(SPAN)) == MAX_IN_FLIGHT


# -- absorbing


def test_an_entry_of_its_own_resolves_the_contribution_and_keeps_the_residual(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(4)
    contribution = island.contribute(round_index=0)
    island.step(2)
    kept = {span: island.residual(span) for span in PLAN.spans_of(0)}
    absorb_alone(island, contribution)
    for span, residual_N in kept.items():
        assert island.in_flight(span) == ()
        np.testing.assert_allclose(island.residual(span), residual_N, atol=1e-5)
    state = island.state.span_state(SPAN)
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
    assert len({digest(peer.state.states()) for peer in (ada, ben, archive)}) == 1
    assert not np.array_equal(ada.local(SPAN), ben.local(SPAN)), "each keeps its own learning"


def test_the_runs_progress_sets_the_inner_schedule(corpus: Corpus) -> None:
    plan = small_plan({"inner.schedule": "cosine", "rounds.planned_cycles": 1})
    island = island_at_start(corpus, plan)
    island.step(1)
    for round_index in (0, 1):
        absorb_alone(island, island.contribute(round_index, fragment=round_index))
        island.step(1)
    assert island.loop.learning_rate == pytest.approx(plan.inner.final_share * plan.inner.learning_rate)


def test_a_replaced_span_treats_contributions_in_flight_as_included(corpus: Corpus) -> None:
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
    assert island.state.span_state(SPAN) is moved
    assert np.abs(island.residual(SPAN)).max() < 1e-5


def test_local_parameters_start_at_the_anchor(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    states = {
        span: SpanState(head=s.head, anchor_N=s.anchor_N + np.float32(1), momentum_N=s.momentum_N.copy())
        for span, s in start_states(PLAN).items()
    }
    island.hold(states)
    assert island.state.begin()
    assert all(np.array_equal(island.local(span), state.anchor_N) for span, state in states.items())


def test_look_returns_a_copy_of_the_local_parameters(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    seen: list[Any] = []
    island.state.look([Slice(1, 0, 100), Slice(0, 7, 9)], seen.append)
    island.settle()
    before = [vector_N.copy() for vector_N in seen[0]]
    assert np.array_equal(before[0], island.parameters.read(1, 0, 100))
    island.step(1)
    assert [len(vector_N) for vector_N in seen[0]] == [100, 2]
    assert all(np.array_equal(one, other) for one, other in zip(before, seen[0], strict=True))


# -- progress


def test_progress_reports_steps_tokens_and_a_smooth_loss(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    assert island.state.progress().steps == 0
    island.step(1)
    first = island.state.progress()
    assert first.loss == pytest.approx(np.log(256), rel=0.05)
    island.step(4)
    later = island.state.progress()
    assert (later.steps, later.tokens) == (5, 5 * PLAN.inner.batch * PLAN.shape.context)
    assert later.loss < first.loss


def test_tokens_per_second_are_measured_over_recent_steps(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    state, moment = island_at_start(corpus).state, 0.0
    monkeypatch.setattr(trained_state, "time", SimpleNamespace(monotonic=lambda: moment))
    said = []
    for pause in (0.0, 1.0, 3600.0, 15.0, 15.0, 15.0):
        moment += pause
        state.meter.stepped(300)
        said.append(state.progress().tokens_per_second)
    assert said == [0.0, 300.0, 300 / 3600, 600 / 3615, 20.0, 20.0], "a pause of an hour is forgotten"


def test_a_step_that_was_not_applied_does_not_change_progress(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    island.step(1)
    before = island.state.progress()
    island.loop.model.norm.gain.data.fill_(float("nan"))
    island.step(1)
    assert island.state.progress() == before


# -- θ follows at step boundaries


def test_entries_are_followed_without_steps_and_theta_follows_at_the_next_boundary(corpus: Corpus) -> None:
    island, prompt = island_at_start(corpus), island_at_start(corpus)
    for each in (island, prompt):
        each.step(2)
    before_N = island.local(SPAN)
    for round_index in (0, 2, 4):
        for each in (island, prompt):
            each.state.apply(half_of(SPAN, round_index))
            each.state.wait_until_idle()
        prompt.state.border()
    state = island.state.span_state(SPAN)
    assert state is not None
    assert (state.head.height, state.head.round) == (3, 4)
    assert np.array_equal(island.local(SPAN), before_N), "θ belongs to the training thread"
    island.state.border()
    np.testing.assert_allclose(island.local(SPAN), prompt.local(SPAN), atol=1e-6)
    moved_N = state.anchor_N - start_states(PLAN)[SPAN].anchor_N
    np.testing.assert_allclose(island.local(SPAN) - before_N, moved_N, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_a_blend_is_the_same_whether_theta_follows_at_once_or_later(corpus: Corpus, alpha: float) -> None:
    plan = small_plan({"outer.merge": "blend", "outer.fragment_update_alpha": alpha})
    late, prompt = island_at_start(corpus, plan), island_at_start(corpus, plan)
    for each in (late, prompt):
        each.step(2)
        each.contribute(0)
    for round_index in (0, 2):
        for each in (late, prompt):
            each.state.apply(half_of(SPAN, round_index))
            each.state.wait_until_idle()
        prompt.state.border()
    late.state.border()
    np.testing.assert_allclose(late.local(SPAN), prompt.local(SPAN), atol=1e-6)
    state = late.state.span_state(SPAN)
    assert state is not None
    is_anchor = np.array_equal(late.local(SPAN), state.anchor_N)
    assert is_anchor == (alpha == 0.0)


def test_a_contribution_is_relative_to_the_state_that_theta_has_followed(corpus: Corpus) -> None:
    """An entry that arrives between boundary and snapshot must not be sent back as something learnt."""
    island = island_at_start(corpus, EXACT)
    island.step(1)
    learnt_N = island.residual(SPAN)
    island.state.apply(half_of(SPAN, 0, EXACT))
    island.state.wait_until_idle()
    contribution = island.state.contribute(2, 0)
    assert contribution is not None
    sent_N = EXACT.codecs.contribution.decode(contribution.spans[0].payload, len(learnt_N))
    np.testing.assert_allclose(sent_N, learnt_N, atol=1e-6)


def test_snapshots_that_nobody_takes_are_answered_once_they_are_late(corpus: Corpus) -> None:
    island = island_at_start(corpus)
    answers: list[Any] = []
    for round_index in range(5):
        island.state.request_contribution(round_index, 0, island.now + 1.0, answers.append)
        island.now += 2.0
    assert answers == [None] * 4


# -- contributing between borders


def island_that_contributes_between(corpus: Corpus, *, steps: int) -> HandDrivenIsland:
    island = HandDrivenIsland(PLAN, corpus, contributes_between=True)
    island.hold(start_states(PLAN))
    island.step(steps)
    return island


def ask(island: HandDrivenIsland, round_index: int = 2) -> list[Any]:
    """Ask for a contribution, and wait for the follower thread but for no border."""
    answers: list[Any] = []
    island.state.request_contribution(round_index, 0, float("inf"), answers.append)
    island.state.wait_until_idle()
    return answers


def test_a_contribution_between_two_borders_is_that_of_the_border_before(corpus: Corpus) -> None:
    between, at_border = island_that_contributes_between(corpus, steps=3), island_at_start(corpus)
    between.state.border()
    (sent,) = ask(between)
    at_border.step(3)
    assert sent == at_border.contribute(round_index=2)


@pytest.mark.parametrize(
    "why", ["a step of the optimiser is not over", "an update of θ waits", "in flight", "no step", "too long for good"]
)
def test_a_contribution_waits_for_the_border_while(why: str, corpus: Corpus) -> None:
    island = island_that_contributes_between(corpus, steps=1)
    island.state.border()
    match why:
        case "a step of the optimiser is not over":
            island.step()
        case "an update of θ waits":
            island.state.apply(half_of(SPAN))
            island.state.wait_until_idle()
        case "in flight":
            assert island.contribute(0) is not None
            island.step()
            island.state.border()
        case "no step":
            absorb_alone(island, island.contribute(0))
        case "too long for good":
            clipped_often(island, times=PATIENT_FOR + 1)
            island.step()
            island.state.border()
    answers = ask(island, 2 if why != "too long for good" else 2 * PATIENT_FOR + 2)
    assert answers == []
    island.state.border()
    assert len(answers) == 1
    assert (answers[0] is None) == (why == "no step")


# -- the trace


def test_changes_of_theta_are_in_the_trace(corpus: Corpus, tmp_path: Path) -> None:
    island = HandDrivenIsland(PLAN, corpus, trace=Trace(tmp_path))
    island.hold(start_states(PLAN))
    island.step(1)
    assert island.state.contribute(0, 0) is not None
    assert island.state.contribute(1, 0) is None, "nothing new"
    island.step(1)
    island.state.apply(half_of(SPAN))
    island.settle()
    island.hold({SPAN: start_states(PLAN)[SPAN]})
    lines = list(read_trace(tmp_path))
    assert [line["what"] for line in lines] == ["loaded", "contributed", "absorbed", "took"]
    assert [line.get("steps") for line in lines[1:]] == [1, 2, 2]
    assert len(lines[0]["heads"]) == len(PLAN.places)
    assert lines[1]["learnt"] == lines[1]["sent"] > lines[1]["given_up"] == 0.0


def test_the_same_events_after_the_same_steps_give_the_same_bytes(corpus: Corpus) -> None:
    twins = [island_at_start(corpus), island_at_start(corpus)]
    for twin in twins:
        twin.step(1)
        twin.contribute(0)
        twin.step(1)
        twin.state.apply(half_of(SPAN))
        twin.settle()
    for one, other in zip(*(twin.parameters.read_all() for twin in twins), strict=True):
        assert np.array_equal(one, other)
    assert len({digest(twin.state.states()) for twin in twins}) == 1


def test_a_late_joiner_follows_the_schedule_at_the_runs_progress(corpus: Corpus) -> None:
    cosine = {"inner.schedule": "cosine", "inner.warmup_steps": 0, "rounds.planned_cycles": 10}
    plan = small_plan(cosine)
    peak, last = plan.inner.learning_rate, plan.inner.learning_rate * plan.inner.final_share
    for height, expected in ((5, (peak + last) / 2), (10, last)):
        island = HandDrivenIsland(plan, corpus)
        states = start_states(plan).items()
        island.hold({span: replace(state, head=replace(state.head, height=height)) for span, state in states})
        island.step(1)
        assert island.loop.learning_rate == pytest.approx(expected)


# -- damaged memory


def spoilt(span: SpanId) -> SpanState:
    """Return the initial state of a span with an infinite number in its anchor, like one after a bit flip."""
    state = start_states(PLAN)[span]
    anchor_N = state.anchor_N.copy()
    anchor_N[5] = np.inf
    return replace(state, anchor_N=anchor_N)


def with_spoilt_span(corpus: Corpus) -> HandDrivenIsland:
    """Return an island that has started, and then one of its spans is damaged."""
    island = island_at_start(corpus)
    island.step(2)
    island.hold({SPAN: spoilt(SPAN)})
    return island


def test_a_span_that_cannot_follow_an_entry_stops_until_it_is_replaced_and_training_continues(
    corpus: Corpus,
) -> None:
    island = with_spoilt_span(corpus)
    for round_index in (0, 2):
        island.state.apply(half_of(SPAN, round_index))
    island.settle()
    assert [span for span, _ in island.damaged] == [SPAN], "reported once"
    assert "non-finite numbers" in island.damaged[0][1]
    assert island.state.span_state(SPAN) is None, "a damaged span is given to nobody"
    assert dict(island.state.moving_states()) == {}, "it is in no checkpoint"
    island.step()
    island.settle()
    assert np.isfinite(island.local(SPAN)).all(), "training begins again from the sound spans"
    island.step(2)
    contributed = island.contribute(round_index=4)
    assert SPAN not in [part.span for part in contributed.spans]
    assert len(contributed.spans) == len(PLAN.spans_of(0)) - 1
    sound = start_states(PLAN)[SPAN]
    island.hold({SPAN: sound})
    assert island.state.span_state(SPAN) is sound
    assert np.array_equal(island.local(SPAN), sound.anchor_N), "no damaged number is used"
    island.state.apply(half_of(SPAN))
    island.settle()
    now = island.state.span_state(SPAN)
    assert now is not None
    assert now.head.height == 1
    island.step(1)
    assert np.isfinite(island.state.progress().loss)
    assert len(island.contribute(round_index=6).spans) == len(PLAN.spans_of(0))
    assert island.failures == []


def test_damaged_spans_are_left_out_of_a_choice_of_spans(corpus: Corpus) -> None:
    island = with_spoilt_span(corpus)
    island.state.apply(half_of(SPAN))
    answers: list[Any] = []
    island.state.request_contribution(0, 0, float("inf"), answers.append, frozenset(PLAN.spans_of(0)[:2]))
    island.settle()
    assert [part.span for part in answers[0].spans] == [PLAN.spans_of(0)[1]]
