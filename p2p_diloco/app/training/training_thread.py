"""The built-in trainer's thread: runs inner steps, and applies updates from the swarm between them.

If the island has several ranks, each turn of the thread is a call that all of them make: rank 0 applies updates and
says whether a step follows, which all make together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

from p2p_diloco.app.training.inner_loop import InnerLoop, StepResult
from p2p_diloco.app.training.micro_batch import most_windows, with_margin
from p2p_diloco.app.training.rank_steps import RankSteps
from p2p_diloco.island.batch_size import BatchChoice
from p2p_diloco.island.island import THE_END, TURN, Island
from p2p_diloco.island.ranks import RankLost
from p2p_diloco.rate import counted
from p2p_diloco.session.trained_state import IDLE_SECONDS, TrainedState
from p2p_diloco.session.training import Pace

MANY_NOT_APPLIED = 32
"""Steps in a row with infinite gradients after which the peer counts as not stepping, and begins again from φ."""


class Steps:
    """Steps of the built-in inner loop, in parts that fit into memory.

    Args:
        windows_at_once: windows that pass through the model at a time; None: on an accelerator as many as fit, which is
            tried after the first step; on a processor the whole first batch.
        report: called with a sentence once the number is found.
        ranks: the ranks that make the steps together, each with this object; None: only this process.
    """

    def __init__(
        self,
        loop: InnerLoop,
        *,
        windows_at_once: int | None = None,
        report: Callable[[str], None] = lambda text: None,
        ranks: RankSteps | None = None,
    ) -> None:
        self.loop = loop
        self._report = report
        self._ranks = ranks
        self._is_accelerator = loop.device.type != "cpu"
        self._takes_all = windows_at_once is None
        # Of shards, all ranks need each other in each try, also the one that has run out of memory.
        self._can_search = self._takes_all and self._is_accelerator and (ranks is None or not ranks.has_shards)
        self._searches = self._can_search and loop.stream.batch > 1
        if windows_at_once is not None:
            loop.use_windows(windows_at_once)
        elif self._is_accelerator:
            loop.use_windows(1)

    def make(self) -> StepResult:
        step = self.loop.step()
        if self._searches:
            self._searches = False
            self._fill_memory()
        return step

    def use_batch(self, windows: int) -> None:
        """Let each step take that many windows from now on; of several ranks, all call this before the same step."""
        loop = self.loop
        took_all = self._takes_all and loop.windows_at_once >= self._windows_of_rank()
        grows, loop.stream.batch = windows > loop.stream.batch, windows
        # If not all fitted before, the number that does is known.
        self._searches = self._searches or (took_all and grows and self._can_search)

    def _fill_memory(self) -> None:
        """Find the number of windows that fit into memory now that the optimisers' moments are there."""
        loop, wanted = self.loop, self._windows_of_rank()
        fitting = self._most_windows(wanted)
        if fitting == 0 and loop.start_recomputing():
            fitting = self._most_windows(wanted)
        loop.use_windows(with_margin(fitting, wanted))
        if fitting < wanted:
            self._report(
                f"{fitting} of the {wanted} windows of a step fit into the memory of {loop.device}; using "
                f"{loop.windows_at_once} at a time, with the same gradients"
            )

    def _windows_of_rank(self) -> int:
        count = self._ranks.count if self._ranks is not None else 1
        return -(-self.loop.stream.batch // count)

    def _most_windows(self, wanted: int) -> int:
        fitting = most_windows(self.loop.try_windows, wanted)
        return fitting if self._ranks is None else self._ranks.least(fitting)


class StepRunner:
    """Makes steps and counts them in the model's state.

    Attributes:
        num_not_applied: number of the latest steps in a row whose loss or gradient was not finite.

    Args:
        choice: chooses the windows of each step; None: they never change.
        changed: called with their number when it changes.
    """

    def __init__(
        self,
        steps: Steps,
        state: TrainedState,
        *,
        choice: BatchChoice | None = None,
        changed: Callable[[int], None] = lambda windows: None,
    ) -> None:
        self.loop = steps.loop
        self.state = state
        self.num_not_applied = 0
        self._steps = steps
        self._choice = choice
        self._changed = changed

    def step(self) -> None:
        self.loop.set_progress(self.state.fraction)
        step = self._steps.make()
        self.num_not_applied = 0 if step.applied else self.num_not_applied + 1
        if step.broken:
            self.state.undo(step.broken, step.loss)
        elif step.applied:
            seconds = self.state.meter.seconds_since_step()
            self.state.meter.stepped(step.tokens, step.loss)
            if self._choice is not None:
                self._choose_batch(self._choice, seconds)
        elif self.num_not_applied % MANY_NOT_APPLIED:
            why = f"a step had a loss ({step.loss:g}) or a gradient that is not finite, and changed nothing"
            self.state.meter.failed(why)
        else:
            self.state.begin_again(f"the last {MANY_NOT_APPLIED} steps had losses or gradients that are not finite")

    def _choose_batch(self, choice: BatchChoice, seconds: float) -> None:
        before = self.loop.stream.batch
        windows = choice.stepped(before, seconds)
        if windows != before:
            self.use_batch(windows)
            self.state.host.report_soon("batch", self._explain(choice, before))
            self._changed(windows)

    def _explain(self, choice: BatchChoice, before: int) -> str:
        planned, planned_steps, steps = self.loop.rule.batch, choice.planned_steps, choice.cycle_steps or 0.0
        ratio = "as planned" if choice.size == planned else f"{choice.size / planned:.3g} times the planned {planned}"
        if before < choice.size and steps < planned_steps:
            why = f"steps of {counted(before, 'window')} are hardly shorter"
        else:
            number = f"{steps:,.0f}" if steps >= 10.0 else f"{steps:.2g}"
            why = f"{number} steps of {before} fit into a cycle, {planned_steps} are planned"
        return f"a step takes {counted(choice.size, 'window')} from now on, {ratio}: {why}"

    def use_batch(self, windows: int) -> None:
        """Let each step take that many windows from now on."""
        self._steps.use_batch(windows)
        self.state.note_batch(windows)


class TrainingThread:
    """The thread that trains a model; only it touches θ.

    Args:
        step: makes one step; None: no training, θ only follows entries.
        pace: how the machine's owner limits steps; None: not at all.
        can_step: returns whether a step can be made, for a text that has yet to arrive.
        island: the ranks that make the steps together, of which this is rank 0; None: only this process.
        windows: returns the windows of the next step, for the other ranks.
    """

    def __init__(
        self,
        *,
        state: TrainedState,
        step: Callable[[], None] | None,
        can_step: Callable[[], bool] = lambda: True,
        pace: Pace | None = None,
        island: Island | None = None,
        windows: Callable[[], int] = lambda: 0,
    ) -> None:
        self.state = state
        self._island = island
        self._windows = windows
        self._rests_until = float("-inf")
        self._step = step
        self._can_step = can_step
        self._woken = threading.Event()
        self._stopping = False
        self._training = True
        self._pace = pace or Pace()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        state.wake_with(self._woken.set)

    def start(self) -> None:
        self._thread.start()

    def stop_training(self) -> None:
        self._training = False

    def stop(self) -> None:
        """Finish pending work and end the thread."""
        self._stopping = True
        self._woken.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end; return whether it has. A thread that was never started counts as ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def wait_until_idle(self) -> None:
        """Wait until all submitted updates are in φ, m and θ; blocks."""
        self.state.wait_until_idle()
        while self.state.has_work and self._thread.is_alive():
            time.sleep(IDLE_SECONDS)

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._stopping
                if self._turn(is_last):
                    assert self._step is not None, "it is there if a step may be made"
                    began = time.monotonic()
                    with self._island.exchanging() if self._island is not None else nullcontext():
                        self._step()
                    ended = time.monotonic()
                    self._rests_until = ended + self._pace.rest_seconds(ended - began)
        except RankLost:
            return  # the island has said so, and this peer leaves
        except BaseException as error:
            failure = error
            self.state.host.in_loop(lambda: self.state.host.died(failure))

    def _turn(self, is_last: bool) -> bool:
        """Apply what is due and return whether a step follows; of several ranks, all of them make this turn."""
        if self._island is None:
            return self._turn_here()
        result = self._island.call(TURN, lambda reports: self._turn_of_ranks(is_last))
        return isinstance(result, tuple)

    def _turn_of_ranks(self, is_last: bool) -> tuple[float, int] | str | None:
        """Return the progress of the run and the windows of the step if one follows, and `THE_END` in the last turn."""
        if is_last:
            self.state.border()
            return THE_END
        return (float(self.state.fraction), self._windows()) if self._turn_here() else None

    def _turn_here(self) -> bool:
        self._woken.clear()
        self.state.border()
        if self.may_step():
            return True
        if not self.state.has_work and not self._stopping:
            left = self._rests_until - time.monotonic()
            self._woken.wait(min(left, IDLE_SECONDS) if left > 0.0 else IDLE_SECONDS)
        return False

    def may_step(self) -> bool:
        """Return whether to make an inner step; otherwise wait for the next entry."""
        may_train = self._training and not (self._stopping or self._pace.is_paused) and self._step is not None
        return self.state.begin() and may_train and time.monotonic() >= self._rests_until and self._can_step()
