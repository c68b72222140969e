"""The batch of an island follows its speed, and then stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.island.batch_size import LARGEST_BATCH, MOST_OFF, WORTH, BatchAdvice, BatchChoice, batch_sizes

PLANNED, STEPS, CYCLE_SECONDS = 8, 8, 16.0
PLANNED_SECONDS = CYCLE_SECONDS / STEPS
SIZES = batch_sizes(PLANNED)
LONG_SECONDS = 1800.0

Speed = Callable[[int, float], float]
"""The seconds of a step, from its windows and the time at which it begins."""


class Machine:
    """An island that makes steps at some speed.

    Attributes:
        taken: sizes of its steps, without repetitions, with the time since when.
    """

    def __init__(self, speed: Speed, sizes: Sequence[int] = SIZES) -> None:
        self.choice = BatchChoice(sizes, planned=PLANNED, planned_steps=STEPS, cycle_seconds=CYCLE_SECONDS)
        self.speed, self.now, self.num_steps = speed, 0.0, 0
        self.taken = [(0.0, PLANNED)]

    def run(self, seconds: float = LONG_SECONDS, steps: int = 100) -> Machine:
        """Make steps for that long, and at least that many."""
        until, last = self.now + seconds, self.num_steps + steps
        while self.now < until or self.num_steps < last:
            took = self.speed(self.choice.size, self.now)
            self.now += took
            self.num_steps += 1
            self.choice.stepped(self.choice.size, took)
            if self.choice.size != self.taken[-1][1]:
                self.taken.append((self.now, self.choice.size))
        return self

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.taken]

    def off(self) -> float:
        """Return the steps of a cycle over the planned ones."""
        return PLANNED_SECONDS / self.speed(self.choice.size, self.now)


def linear(fixed: float, share: float) -> Speed:
    """Return a speed at which a planned step takes these multiples of the planned seconds, the second by windows."""
    return lambda windows, _: PLANNED_SECONDS * (fixed + share * windows / PLANNED)


@pytest.mark.parametrize(
    ("planned", "ranks", "has_shards", "sizes"),
    [
        (8, 1, False, (1, 2, 4, 8, 16)),
        (1, 1, False, (1, 2)),
        (6, 1, False, (1, 2, 3, 6, 12)),
        (8, 3, False, (3, 4, 8, 16)),
        (12, 4, True, (4, 8, 12, 24)),
        (4, 4, True, (4, 8)),
    ],
)
def test_sizes_are_the_planned_one_halved_and_doubled(
    planned: int, ranks: int, has_shards: bool, sizes: tuple[int, ...]
) -> None:
    assert batch_sizes(planned, ranks=ranks, has_shards=has_shards) == sizes


@given(planned=st.integers(1, 1000), ranks=st.integers(1, 16), has_shards=st.booleans())
def test_each_size_is_at_most_twice_the_one_before_and_can_be_shared_out(
    planned: int, ranks: int, has_shards: bool
) -> None:
    planned = planned * ranks if has_shards else max(planned, ranks)
    sizes = batch_sizes(planned, ranks=ranks, has_shards=has_shards)
    assert planned in sizes
    assert (sizes[0], sizes[-1]) == (ranks, LARGEST_BATCH * planned)
    assert all(size < larger <= 2 * size for size, larger in pairwise(sizes))
    assert not has_shards or not any(size % ranks for size in sizes)


@pytest.mark.parametrize(
    ("speed", "taken"),
    [
        (linear(0.0, 1.0), [8]),
        (linear(0.0, 0.6), [8, 16]),  # nearer to it than one at 1.67 times the planned steps
        (linear(0.0, 0.8), [8]),
        (linear(0.0, 1 / 3.0), [8, 16]),
        (linear(0.0, 0.01), [8, 16]),
        (linear(0.0, 8.0), [8, 1]),
        (linear(0.0, 30.0), [8, 1]),
        (linear(1.2, 3.0), [8, 2, 1]),  # a part of the time is fixed, so the first choice is not small enough
        (linear(0.3, 0.0), [8, 16]),  # a GPU with room
        (linear(0.65, 0.001), [8, 16]),  # one too many steps, which more windows do not change
        (linear(3.0, 0.1), [8, 2, 8]),  # smaller steps are hardly shorter
    ],
)
def test_a_machine_settles_at_the_size_that_suits_it(speed: Speed, taken: list[int]) -> None:
    assert Machine(speed).run().sizes == taken


@settings(max_examples=30)
@given(fixed=st.floats(0.0, 8.0), share=st.floats(0.01, 30.0))
def test_a_constant_speed_settles_near_the_planned_steps_within_a_few_changes(fixed: float, share: float) -> None:
    machine = Machine(linear(fixed, share)).run()
    assert len(machine.sizes) <= 2 + math.log2(PLANNED * LARGEST_BATCH)
    settled = list(machine.sizes)
    assert machine.run().sizes == settled, "it never changes again"
    if machine.off() > MOST_OFF:
        assert machine.choice.size == SIZES[-1]
    elif machine.off() < 1.0 / MOST_OFF and machine.choice.size > 1:
        smaller = machine.speed(machine.choice.size // 2, 0.0)
        before = settled[settled.index(machine.choice.size) + 1 :]
        assert before or machine.speed(machine.choice.size, 0.0) < WORTH * smaller, "a smaller one was not worth it"


@settings(max_examples=30)
@given(times=st.lists(st.floats(0.02, 40.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_relation_of_windows_and_time_makes_it_flap(times: list[float]) -> None:
    """Also where a larger step takes many times as long, as with memory that is swapped."""
    of_size = dict(zip(SIZES, sorted(times), strict=True))
    machine = Machine(lambda windows, _: of_size[windows]).run(4 * LONG_SECONDS, 400)
    settled = list(machine.sizes)
    assert len(settled) <= 2 * len(SIZES)
    assert machine.run().sizes == settled


def test_a_larger_size_that_was_far_slower_is_not_tried_again() -> None:
    machine = Machine(lambda windows, _: 0.9 if windows <= 8 else 9.0).run()
    assert machine.sizes == [8, 16, 8]
    assert machine.choice.sizes[-1] == 8


@settings(max_examples=30)
@given(at=st.integers(0, 40), long_seconds=st.floats(10.0, 1e6), share=st.floats(0.2, 4.0))
def test_a_single_long_step_changes_nothing(at: int, long_seconds: float, share: float) -> None:
    """A machine that sleeps, a first step that compiles, a pause."""
    usual = Machine(linear(0.0, share)).run()

    def sleeps_once(windows: int, now: float) -> float:
        return linear(0.0, share)(windows, now) if machine.num_steps != at else long_seconds

    machine = Machine(sleeps_once)
    machine.run().run(long_seconds, 100)
    assert machine.sizes == usual.sizes


@pytest.mark.parametrize("slower", [3.0, 10.0])
@pytest.mark.parametrize("begins", [400.0, 455.0, 512.5])
def test_a_game_for_a_minute_changes_nothing_and_one_for_an_hour_only_for_its_time(
    slower: float, begins: float
) -> None:
    for seconds, changes in ((60.0, 0), (3600.0, 2)):

        def played(windows: int, now: float, seconds: float = seconds) -> float:
            return linear(0.0, slower if begins <= now < begins + seconds else 1.0)(windows, now)

        machine = Machine(played).run(3 * 3600.0)
        assert machine.choice.size == PLANNED
        assert len(machine.sizes) - 1 >= changes
        assert bool(changes) == (min(machine.sizes) < PLANNED)
        since = machine.taken[-1][0]
        assert since <= begins + seconds + 600.0


def test_a_machine_that_slows_down_more_and_more_does_not_take_a_size_that_it_gave_up() -> None:
    choice = BatchChoice(SIZES, planned=PLANNED, planned_steps=15, cycle_seconds=60.0)
    for seconds, size in ((1.0, 16), (10.0, 8)):
        while choice.size != size:
            choice.stepped(choice.size, seconds)
    assert choice.sizes == (1, 2, 4, 8)
    for _ in range(60):
        assert choice.stepped(choice.size, 9.0) <= 8


def test_the_owners_share_of_the_device_may_change() -> None:
    machine = Machine(lambda windows, now: linear(0.0, 4.0 if now > 1000.0 else 1.0)(windows, now)).run()
    assert machine.sizes == [8, 4, 2]


def test_first_steps_that_compile_are_ignored() -> None:
    machine = Machine(lambda windows, _: 100.0 if machine.num_steps < 2 else PLANNED_SECONDS)
    assert machine.run().sizes == [8]


def test_short_steps_in_a_long_cycle_are_measured_in_bounded_memory() -> None:
    """The median is that of the whole measurement, whose last steps are slower."""
    choice = BatchChoice(SIZES, planned=PLANNED, planned_steps=50_000, cycle_seconds=10_000.0)
    for step in range(24_000):
        choice.stepped(choice.size, 0.1 if step < 14_000 else 0.4)
    assert choice.size == 16
    assert choice.cycle_steps == pytest.approx(100_000)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("speed", "scale"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.25), (0.01, 2.0)])
def test_the_advice_is_the_same_whether_a_loop_follows_it_or_not(follows: bool, speed: float, scale: float) -> None:
    """Its batches vary, and some steps count no tokens."""
    advice = BatchAdvice(planned_steps=STEPS, cycle_seconds=CYCLE_SECONDS)
    assert advice.scale == 1.0
    for step in range(4000):
        tokens = round((900, 1000, 1100)[step % 3] * (advice.scale if follows else 1.0))
        advice.stepped(tokens, PLANNED_SECONDS * speed * tokens / 1000)
        if step % 50 == 0:
            advice.stepped(0, 1.0)
    assert advice.scale == scale
