"""Steps that take a fixed time, so that peers on one machine are as fast as on machines of their own."""

from __future__ import annotations

import time

from p2p_diloco.app.training import built_in
from p2p_diloco.app.training.training_thread import StepRunner

CATCH_UP_SECONDS = 1.0
"""An island that was slower for a moment makes up for this much time."""


def hold_steps(seconds: float) -> None:
    """Let steps of the built-in training take this time on average."""

    class PacedSteps(StepRunner):
        due = 0.0

        def step(self) -> None:
            """Make one step, and sleep until its time is up."""
            self.due = max(self.due, time.monotonic() - CATCH_UP_SECONDS) + seconds
            super().step()
            time.sleep(max(0.0, self.due - time.monotonic()))

    built_in.StepRunner = PacedSteps  # type: ignore[attr-defined]
