"""The real program with built-in training at a fixed step time, and with a wall clock that can be wrong.

`python -m benchmarks.chaos.paced_island SECONDS FOLDER join …`: steps are made as usual, and the rest of the time is
slept, so islands that share a machine do not become faster when one of them is dead. A file in FOLDER tells by how many
seconds the wall clock is ahead; monotonic clocks are the machine's. With --keep-trace, the trace is in FOLDER too, even
if the disk of the state directory is full.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.paced_steps import hold_steps
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.training import built_in
from p2p_diloco.storage.trace import Trace

CLOCK_FILE = "wall_offset"
_LOOK_SECONDS = 0.1
"""Minimum time between reads of the file, because libraries ask for the time often."""


def set_wall_clock(folder: Path, ahead: float) -> None:
    """Set the wall clock of the process of this folder, now and for its next starts."""
    draft = folder / f".{CLOCK_FILE}"
    draft.write_text(str(ahead))
    draft.replace(folder / CLOCK_FILE)


def shift_wall_clock(folder: Path) -> None:
    """Shift this process's wall clock from the machine's, as the file says at any moment."""
    machine_seconds, file = time.time, folder / CLOCK_FILE
    offset, looked_at = 0.0, -_LOOK_SECONDS

    def shifted() -> float:
        nonlocal offset, looked_at
        if time.monotonic() - looked_at >= _LOOK_SECONDS:
            looked_at = time.monotonic()
            offset = float(file.read_text()) if file.exists() else 0.0
        return machine_seconds() + offset

    time.time = shifted


def keep_trace_in(folder: Path) -> None:
    """Let the trace be written there."""
    built_in.Trace = lambda _: Trace(folder)  # type: ignore[assignment, attr-defined]


if __name__ == "__main__":
    shift_wall_clock(Path(sys.argv[2]))
    hold_steps(float(sys.argv[1]))
    keep_trace_in(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
