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
from pathlib import Path

import uvloop

from benchmarks.chaos.paced_island import shift_wall_clock
from tests.swarm.swarm_peer import main

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.loads(Path(sys.argv[1]).read_text())
    shift_wall_clock(Path(order["folder"]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(order))
