"""The batch of an island: a rule by which machines of different speeds make about the planned steps in a cycle.

A fast island takes more windows in a step, and a slow one fewer: the planned number times a power of two. The time of a
step is not proportional to its windows, because part of it is fixed and a GPU has room until it is full. So the rule
goes one size further and measures again. If it has to go back, it does not try that size again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

LARGEST_BATCH = 2
"""Largest batch of an island, as a multiple of the planned one. An island that is faster still makes more steps: at
equal tokens a batch twice as large costs nothing measurable, one four times as large does
(docs/decisions/weights-and-influence.md)."""
HYSTERESIS = 1.25
MOST_OFF = math.sqrt(2.0) * HYSTERESIS
"""Factor between the steps of a cycle and the planned ones from which another size is tried. Powers of two come within
a factor of √2, so a size that has been chosen stays although measurements vary."""
WORTH = 1.2
"""Half the windows must make at least this many times as many steps; otherwise a smaller batch only loses tokens."""
WARM_UP_STEPS = 2
"""Steps ignored at the start and after each change: they compile, allocate, and search how much fits into memory."""
FEWEST_STEPS = 3
"""Fewest steps of a measurement, so that a single long one (sleep, swapping) changes nothing."""
FIRST_CYCLES = 0.5
"""Length of the first measurement, from which any size may be chosen."""
LATER_CYCLES, LATER_SECONDS = 2.0, 120.0
"""Length of each later one, which changes the size by one at most: the longer of the two. A machine that is busy for a
minute makes fewer steps in it, so the median is still that of the idle machine."""
MOST_TIMES = 1024
"""Step times kept of one measurement; of more, every second one is dropped."""
_WHOLE = 256
"""The size that stands for the batch of a training loop of its own, so that its parts are whole numbers."""


def batch_sizes(planned: int, *, ranks: int = 1, has_shards: bool = False) -> tuple[int, ...]:
    """Return the batches that an island may choose, in ascending order; each is at most twice the one before.

    Args:
        planned: the windows that the run plans for a step.
        ranks: number of ranks that share a batch; each gets at least one window.
        has_shards: whether all ranks need equally many, because each holds a shard of the model.
    """
    parts, unit = [planned], ranks if has_shards else 1
    while parts[0] > ranks:
        parts.insert(0, max(ranks, unit * math.ceil(parts[0] / 2 / unit)))
    doubled = (planned << doublings for doublings in range(1, LARGEST_BATCH.bit_length()))
    return (*parts, *doubled)


def nearest_size(sizes: Sequence[int], wanted: float) -> int:
    """Return the size whose ratio to `wanted`, or of `wanted` to it, is the smallest."""
    return min(sizes, key=lambda size: abs(math.log(size / wanted)))


class BatchChoice:
    """Chooses the size of an island's steps from their durations.

    Attributes:
        size: size of the next step.
        sizes: the sizes that are left to choose from.
        planned_steps: steps of a cycle that the run plans.
        cycle_steps: steps of the size before the last decision that fit into a cycle; None before the first decision.

    Args:
        sizes: the sizes to choose from, in ascending order.
        planned: the one to begin with.
        planned_steps: as above.
        cycle_seconds: length of a cycle.
    """

    def __init__(self, sizes: Sequence[int], *, planned: int, planned_steps: int, cycle_seconds: float) -> None:
        self.size = planned
        self.sizes = tuple(sizes)
        self.cycle_steps: float | None = None
        self.planned_steps = planned_steps
        self._cycle_seconds = cycle_seconds
        self._window_seconds = FIRST_CYCLES * cycle_seconds
        self._before = planned, 0.0
        self._to_ignore = WARM_UP_STEPS
        self._clear()

    def _clear(self) -> None:
        self._measured = 0.0
        self._times: list[float] = []
        self._num_steps, self._stride = 0, 1

    def stepped(self, size: float, seconds: float) -> int:
        """Count a step; return the size of the next one.

        Args:
            size: size of this step. A loop of its own may take another one than it was advised.
            seconds: time from the end of the step before to the end of this one, with rests and pauses.
        """
        if self._to_ignore:
            self._to_ignore -= 1
            return self.size
        if self._num_steps % self._stride == 0:
            self._times.append(max(seconds, 1e-9) / size)
            if len(self._times) > MOST_TIMES:
                self._times, self._stride = self._times[::2], 2 * self._stride
        self._num_steps += 1
        # A step counts for at most its share of the measurement, however long it took.
        self._measured += min(FEWEST_STEPS * seconds / self._window_seconds, 1.0)
        if self._measured >= FEWEST_STEPS:
            self._decide()
        return self.size

    def _decide(self) -> None:
        is_first, size = self.cycle_steps is None, self.size
        self.cycle_steps = cycle_steps = self._cycle_seconds / (median(self._times) * size)
        self._window_seconds = max(LATER_CYCLES * self._cycle_seconds, LATER_SECONDS)
        self._clear()
        wanted = self._suited(cycle_steps / self.planned_steps, is_first=is_first)
        (size_before, steps_before), self._before = self._before, (size, cycle_steps)
        is_left = size_before in self.sizes
        if size < size_before and is_left and cycle_steps < steps_before * WORTH ** math.log2(size_before / size):
            wanted = size_before
            self.sizes = self.sizes[self.sizes.index(wanted) :]
        elif wanted < size > size_before:
            self.sizes = self.sizes[: self.sizes.index(wanted) + 1]
        if wanted != size:
            self.size, self._to_ignore = wanted, WARM_UP_STEPS

    def _suited(self, off: float, *, is_first: bool) -> int:
        """Return the size to try, where a cycle has `off` times the planned steps at the present one."""
        if is_first:  # the time of a step changes less than its windows do, so this never goes too far
            return nearest_size(self.sizes, off * self.size)
        place = self.sizes.index(self.size)
        if off > MOST_OFF:
            return self.sizes[min(place + 1, len(self.sizes) - 1)]
        return self.sizes[max(place - 1, 0)] if off < 1.0 / MOST_OFF else self.size


class BatchAdvice:
    """Advises a training loop of its own by the same rule; the loop may follow or not.

    Its batch is what it trains on in its first steps.
    """

    def __init__(self, *, planned_steps: int, cycle_seconds: float) -> None:
        self._choice = BatchChoice(
            batch_sizes(_WHOLE), planned=_WHOLE, planned_steps=planned_steps, cycle_seconds=cycle_seconds
        )
        self._first: list[int] = []

    @property
    def scale(self) -> float:
        """The multiple of the first batch that suits the planned steps: a power of two."""
        return self._choice.size / _WHOLE

    def stepped(self, tokens: int, seconds: float) -> None:
        """Count a step on that many tokens; `seconds` is the time since the step before."""
        if tokens <= 0:
            return
        if len(self._first) < FEWEST_STEPS:
            self._first.append(tokens)
        else:
            self._choice.stepped(_WHOLE * tokens / median(self._first), seconds)
