"""The built-in trainer's thread steps, lets θ follow, and ends on request."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_run import HandDrivenIsland, entry_payload, peer_key, small_corpus, small_plan, start_states, update_of

from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.training_thread import MANY_NOT_APPLIED, StepRunner, Steps, TrainingThread
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.batch_size import BatchChoice
from p2p_diloco.session.trained_state import MOST_UNDONE
from p2p_diloco.session.training import Pace

PLAN = small_plan()
SPAN = SpanId(0, 0)
PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_corpus(tmp_path_factory.mktemp("text"))


class Desk:
    """A stand-in for the event loop: the test runs the calls that threads hand over."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()

    def hand_over(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def do_one(self) -> None:
        self._calls.get(timeout=PATIENCE_SECONDS)()


class Training:
    """A running training thread and its island."""

    def __init__(self, corpus: Corpus, step: Callable[[], None] | None = None) -> None:
        self.desk = Desk()
        self.island = HandDrivenIsland(PLAN, corpus, in_loop=self.desk.hand_over)
        self.state = self.island.state
        self.pace = Pace()
        self.thread = TrainingThread(
            state=self.state,
            step=step if step is not None else StepRunner(Steps(self.island.loop), self.state).step,
            pace=self.pace,
        )
        self.thread.start()

    def hold_start(self) -> None:
        for span, state in start_states(PLAN).items():
            self.state.replace(span, state)

    def end(self) -> None:
        self.thread.stop()
        assert self.thread.join(PATIENCE_SECONDS)


@pytest.fixture
def training(corpus: Corpus) -> Iterator[Training]:
    training = Training(corpus)
    yield training
    training.end()


def test_it_trains_answers_snapshots_and_ends_on_request(training: Training) -> None:
    answers = queue.Queue[Any]()
    training.hold_start()
    contribution, round_index, give_up = None, 0, time.monotonic() + PATIENCE_SECONDS
    while contribution is None:
        assert time.monotonic() < give_up, "it made no step"
        training.state.request_contribution(round_index, 0, float("inf"), answers.put)
        training.desk.do_one()
        contribution = answers.get_nowait()
        round_index += 2
    assert training.state.progress().steps >= contribution.steps > 0


def test_entries_are_followed_even_without_training(training: Training) -> None:
    training.thread.stop_training()
    training.hold_start()
    ones = np.ones(PLAN.rules.span_elements[SPAN], np.float32)
    training.state.apply(update_of(SPAN, 0, entry_payload(PLAN, ones)))
    training.thread.wait_until_idle()
    training.end()
    state = training.state.span_state(SPAN)
    assert state is not None
    assert state.head.height == 1
    assert training.state.progress().steps == 0
    assert np.array_equal(training.island.local(SPAN), state.anchor_N), "θ follows without a step"


def test_waiting_until_idle_ends_after_the_thread_has_ended(training: Training) -> None:
    training.end()
    training.hold_start()
    training.thread.wait_until_idle()
    assert set(training.state.states()) == set(PLAN.places)


def test_a_thread_that_dies_reports_its_error_in_the_loop(corpus: Corpus) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    training = Training(corpus, fail)
    training.hold_start()
    training.desk.do_one()
    assert [str(error) for error in training.island.failures] == ["the disk is gone"]
    training.end()


def test_it_runs_until_stopped_and_a_thread_that_never_started_need_not_be_waited_for(training: Training) -> None:
    assert not training.thread.join(0.0)
    never = TrainingThread(state=training.state, step=None)
    assert never.join(0.0)
    training.state.wake_with(lambda: None)


def test_paused_it_makes_no_step_and_still_answers(training: Training) -> None:
    answers = queue.Queue[Any]()
    training.hold_start()
    training.pace.set_paused(True)
    training.state.request_contribution(0, 0, float("inf"), answers.put)
    training.desk.do_one()
    assert answers.get_nowait() is None, "no step was made since the start"
    assert training.state.progress().steps == 0
    training.pace.set_paused(False)
    for round_index in range(2, 10_000, 2):
        training.state.request_contribution(round_index, 0, float("inf"), answers.put)
        training.desk.do_one()
        if answers.get_nowait() is not None:
            break
    assert training.state.progress().steps > 0


def test_between_two_steps_of_a_small_duty_it_still_answers_and_ends_at_once(corpus: Corpus) -> None:
    answers = queue.Queue[Any]()
    stepped = threading.Event()

    def step() -> None:
        training.state.meter.stepped(1)
        stepped.set()
        time.sleep(0.05)

    training = Training(corpus, step)
    training.pace.set_duty(0.0005)  # the rest takes a hundred seconds
    training.hold_start()
    assert stepped.wait(PATIENCE_SECONDS)
    for round_index in (0, 2):
        training.state.request_contribution(round_index, 0, float("inf"), answers.put)
        training.desk.do_one()
    assert answers.get_nowait().steps == 1
    assert training.state.progress().steps == 1
    training.end()


@pytest.mark.parametrize(("duty", "seconds"), [(None, 0.0), (1.0, 0.0), (0.5, 2.0), (0.1, 18.0)])
def test_the_rest_after_a_step_follows_from_the_share_of_the_device(duty: float | None, seconds: float) -> None:
    pace = Pace()
    pace.set_duty(duty)
    assert pace.rest_seconds(2.0) == pytest.approx(seconds)


def test_a_model_whose_steps_change_nothing_begins_again_and_in_the_end_stops(corpus: Corpus) -> None:
    """Otherwise a model that has diverged would never learn again."""
    island = HandDrivenIsland(small_plan({"inner.learning_rate": 1e30, "inner.optimizer": "adamw"}), corpus)
    island.hold(start_states(PLAN))

    def train() -> None:
        for _ in range(5 * MANY_NOT_APPLIED):
            island.step()
            island.settle()

    with pytest.raises(ConfigError, match=f"last {MANY_NOT_APPLIED} steps had losses .*, the third failure in a row"):
        train()
    progress = island.state.progress()
    assert (progress.steps, progress.undone) == (MOST_UNDONE, MOST_UNDONE * MANY_NOT_APPLIED)
    for span in PLAN.places:
        assert np.abs(island.local(span)).max() < 10.0


def test_a_step_that_breaks_the_model_is_undone_at_the_next_border(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    island.step(2)
    island.loop.model.norm.gain.data.fill_(float("nan"))
    island.step()
    island.settle()
    assert island.state.progress().undone == 1
    assert island.contribute(0) is None
    for span in PLAN.places:
        assert np.isfinite(island.local(span)).all()
    island.step()
    assert island.contribute(0).steps == 1
    assert island.loop.learning_rate == island.loop.rule.learning_rate, "of the second step after a warm-up of one"


class LittleMemory:
    """A stand-in for a loop on an accelerator: so many windows fit, and so many once activations are recomputed."""

    def __init__(self, fitting: int, recomputed: int) -> None:
        self.device, self.stream, self.windows_at_once = torch.device("cuda"), SimpleNamespace(batch=64), 64
        self.fitting, self._recomputed = fitting, recomputed
        self.made: list[int] = []
        self.num_searches = 0

    def step(self) -> None:
        self.made.append(self.windows_at_once)

    def use_windows(self, windows: int) -> None:
        self.windows_at_once = windows

    def try_windows(self, windows: int) -> bool:
        self.num_searches += windows == 1
        return windows <= self.fitting

    def start_recomputing(self) -> bool:
        self.fitting, could = self._recomputed, self.fitting < self._recomputed
        return could


@pytest.mark.parametrize(
    ("fitting", "recomputed", "used", "found"), [(0, 20, 18, 20), (0, 0, 1, 0), (10, 20, 9, 10), (64, 64, 64, None)]
)
def test_the_windows_that_fit_are_found_after_the_first_step(
    fitting: int, recomputed: int, used: int, found: int | None
) -> None:
    """Activations are recomputed only if not one window fits without."""
    said: list[str] = []
    loop = LittleMemory(fitting, recomputed)
    steps = Steps(cast(InnerLoop, loop), report=said.append)
    for _ in range(2):
        steps.make()
    assert loop.made == [1, used]
    text = f"{found} of the 64 windows of a step fit into the memory of cuda; using {used} at a time, with the same "
    assert said == ([] if found is None else [f"{text}gradients"])


@pytest.mark.parametrize(
    ("fitting", "device", "at_once", "made", "num_searches"),
    [
        (100, "cuda", None, [1, 64, 64, 90, 90, 90], 3),  # 128 do not fit; then 32 of 90 at a time are one part
        (40, "cuda", None, [1, 36, 36, 36, 36, 36], 2),  # that 36 of 128 fit is known
        (200, "cuda", None, [1, 64, 64, 128, 128, 128], 3),
        (200, "cuda", 48, [48] * 6, 0),
        (200, "cpu", None, [64] * 6, 0),  # a processor may swap instead of refusing
        (200, "cpu", 48, [48] * 6, 0),
    ],
)
def test_a_larger_batch_is_taken_in_parts_that_fit_into_memory(
    fitting: int, device: str, at_once: int | None, made: list[int], num_searches: int
) -> None:
    """In the first step of a larger batch, as many at a time as before."""
    loop = LittleMemory(fitting, fitting)
    loop.device = torch.device(device)
    steps = Steps(cast(InnerLoop, loop), windows_at_once=at_once)
    for batch in (64, 64, 128, 128, 32, 64):
        steps.use_batch(batch)
        steps.make()
    assert (loop.made, loop.num_searches) == (made, num_searches)


class Script:
    """A stand-in for the choice of a batch that is known in advance, step by step."""

    planned_steps, cycle_steps = 16, 61.4

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.size, self._left = sizes, PLAN.inner.batch, list(sizes)

    def stepped(self, size: float, seconds: float) -> int:
        assert size == self.size
        assert seconds >= 0.0
        self.size = self._left.pop(0) if self._left else self.size
        return self.size


def test_the_batch_of_a_step_is_known_when_the_text_is_asked_for_it_and_no_step_is_lost(corpus: Corpus) -> None:
    """Text that arrives must hold all windows of the step that is made next."""
    island, seen, changed = HandDrivenIsland(PLAN, corpus), list[int](), list[int]()
    sizes, stream = (2, 8, 8, 1, 2), island.loop.stream
    choice = cast(BatchChoice, Script(*sizes))
    runner = StepRunner(Steps(island.loop), island.state, choice=choice, changed=changed.append)

    def can_step() -> bool:
        seen.append(stream.batch)
        return len(seen) <= 1 + len(sizes)

    thread = TrainingThread(state=island.state, step=runner.step, can_step=can_step)
    island.hold(start_states(PLAN))
    thread.start()
    give_up = time.monotonic() + PATIENCE_SECONDS
    while len(seen) <= 1 + len(sizes) and time.monotonic() < give_up:
        time.sleep(0.01)
    thread.stop()
    assert thread.join(PATIENCE_SECONDS)
    assert seen[:6] == [2, *sizes]
    assert changed == [8, 1, 2]
    assert (island.state.counts.steps, island.state.counts.tokens) == (6, (2 + sum(sizes)) * PLAN.shape.context)
    assert stream.position == 2 + sum(sizes)


def test_a_change_of_the_batch_is_reported_with_its_reason(corpus: Corpus) -> None:
    texts: list[tuple[str, str]] = []
    island = HandDrivenIsland(PLAN, corpus, report=lambda topic, text: texts.append((topic, text)))
    island.hold(start_states(PLAN))
    choice = Script(8, 1, 2)
    runner = StepRunner(Steps(island.loop), island.state, choice=cast(BatchChoice, choice))
    for cycle_steps in (61.4, 3.04, 3.05):
        choice.cycle_steps = cycle_steps
        runner.step()
    assert texts == [
        (
            "batch",
            "a step takes 8 windows from now on, 4 times the planned 2: 61 steps of 2 fit into a cycle, 16 are planned",
        ),
        (
            "batch",
            "a step takes 1 window from now on, 0.5 times the planned 2: 3 steps of 8 fit into a cycle, 16 are planned",
        ),
        ("batch", "a step takes 2 windows from now on, as planned: steps of 1 window are hardly shorter"),
    ]


def test_a_step_after_a_change_is_that_of_a_loop_with_this_batch_from_the_start(corpus: Corpus) -> None:
    island = HandDrivenIsland(PLAN, corpus)
    island.hold(start_states(PLAN))
    steps = Steps(island.loop)
    steps.make()
    other = HandDrivenIsland(small_plan({"inner.step_tokens": 8 * PLAN.shape.context}), corpus)
    position = island.loop.stream.position
    peer, context = peer_key("ada").peer, PLAN.shape.context
    other.loop.stream = BatchStream(corpus, PLAN.rules.run, peer, batch=8, context=context, position=position)
    other.loop.model.load_state_dict(island.loop.model.state_dict())
    other.loop.load_state_dict(copy.deepcopy(island.loop.state_dict()))
    steps.use_batch(8)
    at_once = island.loop.windows_at_once
    for _ in range(3):
        ours, theirs = steps.make(), Steps(other.loop, windows_at_once=at_once).make()
        assert ours == theirs
        assert ours.tokens == 8 * context
    for name, tensor in island.loop.model.state_dict().items():
        assert torch.equal(tensor, other.loop.model.state_dict()[name])
