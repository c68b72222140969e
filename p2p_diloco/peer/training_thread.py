"""The built-in trainer's thread: runs inner steps, and applies updates from the swarm between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2p_diloco.peer.trained_state import IDLE_SECONDS, TrainedState
from p2p_diloco.training.inner_loop import InnerLoop
from p2p_diloco.training.micro_batch import most_windows, with_margin

MANY_NOT_APPLIED = 32
"""Number of steps in a row with infinite gradients after which the peer counts as not stepping."""


class InnerSteps:
    """Runs steps of the built-in inner loop and counts them in the model's state.

    Args:
        windows_at_once: windows that pass through the model at a time; None: on an accelerator as many as fit, which is
            tried after the first step; on a processor the whole batch.
        report: called with a sentence once the number is found, or when no step can be applied.

    Attributes:
        num_not_applied: number of the latest steps in a row whose loss or gradient was not finite.
    """

    def __init__(
        self,
        loop: InnerLoop,
        state: TrainedState,
        *,
        windows_at_once: int | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.loop = loop
        self.state = state
        self.num_not_applied = 0
        self._report = report
        self._searches = windows_at_once is None and loop.device.type != "cpu" and loop.stream.batch > 1
        if self._searches:
            loop.windows_at_once = 1
        elif windows_at_once is not None:
            loop.windows_at_once = min(windows_at_once, loop.stream.batch)

    def step(self) -> None:
        """Make one step."""
        self.loop.set_progress(self.state.fraction)
        step = self.loop.step()
        if step.applied:  # otherwise its loss may be NaN, which would stay in the average for ever
            self.state.stepped(step.tokens, step.loss)
        self.num_not_applied = 0 if step.applied else self.num_not_applied + 1
        if self.num_not_applied == MANY_NOT_APPLIED:
            self._report(
                f"the last {MANY_NOT_APPLIED} steps had infinite losses or gradients and changed nothing; this peer "
                "contributes nothing until one succeeds; if others train, try --precision float32"
            )
        if self._searches:
            self._searches = False
            self._fill_memory()

    def _fill_memory(self) -> None:
        """Find the number of windows that fit into memory now that the optimisers' moments are there."""
        loop, wanted = self.loop, self.loop.stream.batch
        fitting = most_windows(loop.try_windows, wanted)
        loop.windows_at_once = with_margin(fitting, wanted)
        if fitting < wanted:
            self._report(
                f"{fitting} of the {wanted} windows of a step fit into the memory of {loop.device}; using "
                f"{loop.windows_at_once} at a time, with the same gradients"
            )


def rest_seconds(step_seconds: float, duty: float | None) -> float:
    """Return the pause after a step, such that steps take the share `duty` of the time."""
    return 0.0 if duty is None else step_seconds * (1.0 - duty) / duty


class TrainingThread:
    """The thread that trains a model; only it touches θ.

    Args:
        state: state of the model.
        step: makes one step; None: no training, θ only follows entries.
        in_loop: schedules a call in the event loop.
        died: called in the loop if training ends with an error.
        can_step: returns whether a step can be made, for a text that has yet to arrive.
    """

    def __init__(
        self,
        *,
        state: TrainedState,
        step: Callable[[], None] | None,
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
        can_step: Callable[[], bool] = lambda: True,
    ) -> None:
        self.state = state
        self._step = step
        self._in_loop = in_loop
        self._died = died
        self._can_step = can_step
        self._woken = threading.Event()
        self._stopping = False
        self._training = True
        self.is_paused = False
        """Whether the owner has paused the peer: no steps, but θ still follows entries."""
        self.duty: float | None = None
        """Share of the time in which steps may use the device; None: all of it."""
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        state.wake = self._woken.set

    def start(self) -> None:
        """Start the thread; training starts once all spans are loaded."""
        self._thread.start()

    def stop_training(self) -> None:
        """Stop making inner steps, but keep applying entries to θ."""
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
                self._woken.clear()
                self.state.border()
                if self.may_step():
                    assert self._step is not None
                    began = time.monotonic()
                    self._step()
                    self._rest(rest_seconds(time.monotonic() - began, self.duty))
                elif not self.state.has_work and not self._stopping:
                    self._woken.wait(IDLE_SECONDS)
        except BaseException as error:
            failure = error
            self._in_loop(lambda: self._died(failure))

    def _rest(self, seconds: float) -> None:
        """Make no step for some time; borders go on, so that entries and requests do not wait."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0.0 and not self._stopping:
            self._woken.clear()
            self.state.border()
            if not self.state.has_work:
                self._woken.wait(min(left, IDLE_SECONDS))

    def may_step(self) -> bool:
        """Return whether to make an inner step; otherwise wait for the next entry."""
        may_train = self._training and not (self._stopping or self.is_paused) and self._step is not None
        return self.state.begin() and may_train and self._can_step()
