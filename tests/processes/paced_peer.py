"""The real program with built-in training at a fixed step time: `python paced_peer.py SECONDS join …`.

Steps are made as usual; the rest of the time is slept. So four islands on two cores are as fast as four machines.
"""

from __future__ import annotations

import sys
import time

from p2p_diloco.cli.app import main
from p2p_diloco.peer import built_in
from p2p_diloco.peer.training_thread import InnerSteps


def hold_steps(seconds: float) -> None:
    """Let no step of the built-in training take less time than this."""

    class PacedSteps(InnerSteps):
        def step(self) -> None:
            """Make one step, and sleep until its time is up."""
            until = time.monotonic() + seconds
            super().step()
            time.sleep(max(0.0, until - time.monotonic()))

    built_in.InnerSteps = PacedSteps  # type: ignore[misc, attr-defined]


if __name__ == "__main__":
    hold_steps(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
