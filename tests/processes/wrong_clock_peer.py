"""A peer whose wall clock can be wrong, in its own process: `python wrong_clock_peer.py ORDER.json`.

It is an honest peer, except that `time.time` is ahead by the seconds in the file `wall_offset` in its folder. Writing a
new number to that file sets the wall clock while the peer runs. Monotonic clocks are the machine's.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import time
from pathlib import Path

import uvloop

from tests.swarm.swarm_peer import main

WALL_OFFSET_FILE = "wall_offset"
LOOK_SECONDS = 0.1
"""Minimum time between reads of the file, because libraries ask for the time often."""


def shift_wall_clock(folder: Path) -> None:
    """Shift this process's wall clock from the machine's."""
    machine_seconds, file = time.time, folder / WALL_OFFSET_FILE
    offset, looked_at = 0.0, -LOOK_SECONDS

    def shifted() -> float:
        nonlocal offset, looked_at
        if time.monotonic() - looked_at >= LOOK_SECONDS:
            offset, looked_at = float(file.read_text()), time.monotonic()
        return machine_seconds() + offset

    time.time = shifted


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.loads(Path(sys.argv[1]).read_text())
    shift_wall_clock(Path(order["folder"]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(order))
