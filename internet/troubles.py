"""Troubles of a play: lines that die or lose packets, routers that restart, machines that stop or are busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from internet.places import Internet

DEAD_SECONDS, LOSSY_SECONDS, LOSSY_SHARE = 300.0, 60.0, 0.2
STOPPED_SECONDS, STOPPED_EVERY = 20.0, 60.0
BUSY_PROCESSES = 2 * (os.cpu_count() or 1)
"""Further processes that want a core each."""
NEW_ADDRESS = "45.10.77.1"
AFTER_SECONDS = 90.0
"""Time from the start to the trouble: everybody is in by then."""


@dataclass(slots=True)
class Stage:
    """The site and the processes that a trouble acts on.

    Attributes:
        home: the site with the trouble.
        pid: the process of its machine.
        burners: processes that keep the machine busy.
    """

    internet: Internet
    home: str
    pid: int
    burners: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield the processes of the home's machine."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            yield from (process, *process.children(recursive=True))

    def stop(self) -> None:
        """Stop all processes of the home's machine, as a machine that sleeps."""
        for process in list(self.processes()):
            process.suspend()

    def go_on(self) -> None:
        """Let them run again."""
        for process in self.processes():
            process.resume()

    def kill(self) -> None:
        """Kill all processes of the home's machine."""
        for process in list(self.processes()):
            process.kill()

    def keep_busy(self) -> None:
        """Start processes that take all time that they get."""
        self.burners += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_PROCESSES)]

    def end(self) -> None:
        """End what was started, and let what was stopped run."""
        for burner in self.burners:
            burner.kill()
            burner.wait()
        self.go_on()


Action = Callable[[Stage], None]
Timeline = list[tuple[float, Action]]
"""Actions by the seconds since the start of the trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A trouble, and when it happens in a play of some seconds."""

    told: str
    timeline: Callable[[float], Timeline]


def _dies(seconds: float) -> Timeline:
    dead = min(DEAD_SECONDS, 0.6 * (seconds - AFTER_SECONDS))

    def comes_back(stage: Stage) -> None:
        stage.internet.restart_router(stage.home, address=NEW_ADDRESS)
        stage.internet.cut(stage.home, is_cut=False)

    return [(AFTER_SECONDS, lambda stage: stage.internet.cut(stage.home)), (AFTER_SECONDS + dead, comes_back)]


def _loses(seconds: float) -> Timeline:
    return [
        (AFTER_SECONDS, lambda stage: stage.internet.lose(stage.home, LOSSY_SHARE)),
        (AFTER_SECONDS + LOSSY_SECONDS, lambda stage: stage.internet.lose(stage.home, 0.0)),
    ]


def _stops(seconds: float) -> Timeline:
    at, timeline = AFTER_SECONDS, Timeline()
    while at + STOPPED_SECONDS < seconds:
        timeline += [(at, Stage.stop), (at + STOPPED_SECONDS, Stage.go_on)]
        at += STOPPED_EVERY
    return timeline


TROUBLES = {
    "line-dies": Trouble(told="a line carries nothing for up to 5 minutes, then has another address", timeline=_dies),
    "router-restarts": Trouble(
        told="a router forgets its connections",
        timeline=lambda seconds: [(AFTER_SECONDS, lambda stage: stage.internet.restart_router(stage.home))],
    ),
    "lossy": Trouble(told="a line loses 20 % of its packets for a minute", timeline=_loses),
    "killed": Trouble(told="a machine's processes are killed", timeline=lambda seconds: [(AFTER_SECONDS, Stage.kill)]),
    "stops": Trouble(told="a machine stops for 20 s every minute", timeline=_stops),
    "busy": Trouble(told="all machines are twice over-busy", timeline=lambda seconds: [(0.0, Stage.keep_busy)]),
}
