"""The built-in trainer's thread: inner steps without end, and between two of them what the swarm has for θ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2p_diloco.peer.trained_state import IDLE_SECONDS, TrainedState
from p2p_diloco.training.inner_loop import InnerLoop


class InnerSteps:
    """Steps of the built-in inner loop, counted by the state of the model that it trains."""

    def __init__(self, loop: InnerLoop, state: TrainedState) -> None:
        self.loop = loop
        self.state = state

    def step(self) -> None:
        """Make one."""
        self.loop.set_progress(self.state.fraction)
        step = self.loop.step()
        if step.applied:  # else its loss may be NaN, which would never leave the average again
            self.state.stepped(step.tokens, step.loss)


class TrainingThread:
    """Steps a model; it alone touches θ.

    Args:
        state: of the model.
        step: makes a step of it; None: nobody trains, and θ only follows.
        in_loop: hands a call over to the event loop.
        died: called in the loop when training ended with an error.
    """

    def __init__(
        self,
        *,
        state: TrainedState,
        step: Callable[[], None] | None,
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self.state = state
        self._step = step
        self._in_loop = in_loop
        self._died = died
        self._woken = threading.Event()
        self._stopping = False
        self._training = True
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        state.wake = self._woken.set

    def start(self) -> None:
        """Begin; training starts when all spans are there."""
        self._thread.start()

    def stop_training(self) -> None:
        """Make no inner steps any more, but let θ follow entries."""
        self._training = False

    def stop(self) -> None:
        """Finish what waits and end the thread."""
        self._stopping = True
        self._woken.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread; False when it did not come in time. One that never began has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def wait_until_idle(self) -> None:
        """Wait until everything that was handed over is in φ, m and θ; for a thread that may wait."""
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
                    self._step()
                elif not self.state.has_work and not self._stopping:
                    self._woken.wait(IDLE_SECONDS)
        except BaseException as error:
            failure = error
            self._in_loop(lambda: self._died(failure))

    def may_step(self) -> bool:
        """Return whether an inner step is due; otherwise the next entry is waited for."""
        may_train = self._training and not self._stopping and self._step is not None
        return self.state.begin() and may_train
