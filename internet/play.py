"""Play a scene with real processes: README's commands, or an own loop."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from internet.places import PROJECT, Internet, Place
from internet.scenes import Scene
from internet.troubles import Stage, Trouble

PROGRAM = (sys.executable, "-m", "p2p_diloco")
LOOP = (sys.executable, "-m", "internet.own_loop")
START_FILE = "start.safetensors"
INVITE = re.compile(r"p2pdiloco://[^\s\"']+")
INVITE_SECONDS, END_SECONDS = 90.0, 40.0
BUILT_IN_STATE = Path(".local") / "share" / "p2p-diloco"


class How(enum.StrEnum):
    """The trainer: an own loop whose steps have a fixed length, or the built-in one."""

    LOOP = "loop"
    COMMANDS = "commands"


STATES = {How.LOOP: Path("state"), How.COMMANDS: BUILT_IN_STATE}
"""State directory of a trainer, in its home folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """The options of a play.

    Attributes:
        seconds: duration, from the start of the trainers.
        round_seconds: length of rounds in place of the one that `new` chooses.
        trouble: what goes wrong on the way, at the second trainer.
    """

    how: How
    seconds: float
    step_seconds: float = 0.1
    round_seconds: float | None = None
    trouble: Trouble | None = None


@dataclass(slots=True, kw_only=True)
class Process:
    """A process of the scene.

    Attributes:
        folder: its home folder.
        state: its state directory.
        began: when it was started, Unix seconds.
        ended_after: seconds after which it had ended by itself; None: it ran on.
    """

    name: str
    place: Place
    folder: Path
    state: Path
    began: float = 0.0
    running: subprocess.Popen[str] | None = None
    ended_after: float | None = None
    logs: list[IO[str]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / "output.log"

    def environment(self) -> dict[str, str]:
        """Return an environment without settings of this machine's user."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("P2P_DILOCO_", "XDG_"))}
        folder = str(self.folder)
        return {**kept, "HOME": folder, "PYTHONPATH": str(PROJECT), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}

    def start(self, *command: str) -> None:
        """Start a command in this process's place."""
        self.logs += [self.log.open("a"), (self.folder / "errors.log").open("a")]
        self.began = time.time()
        self.running = subprocess.Popen(
            [*self.place.entrance, *command], cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=self.logs[-2], stderr=self.logs[-1], text=True,
        )  # fmt: skip

    def ask(self, *command: str) -> str:
        """Run a command to its end, and return what it printed."""
        done = subprocess.run(
            [*self.place.entrance, *command], cwd=self.folder, env=self.environment(), capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def told(self) -> str:
        """Return the end of what it printed."""
        return "\n".join((self.folder / name).read_text()[-2000:] for name in ("output.log", "errors.log"))

    def status(self) -> dict[str, Any]:
        """Return the newest status that it wrote; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.state / "status.json").read_text())
            return found
        return {}

    def end(self) -> None:
        """Kill what still runs."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()
        for log in self.logs:
            log.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The processes and lines after a play.

    Attributes:
        began: when the trainers were started, Unix seconds.
        statuses: the last status of each process, by name; the bootstrap peer comes first.
        carried: what the lines carried (`Internet.look`).
        told: what the status of each trainer said was wrong, at first and after changes: seconds, name, sentence.
    """

    scene: Scene
    play: Play
    began: float
    ended: float
    bootstrap: Process
    trainers: dict[str, Process]
    statuses: dict[str, dict[str, Any]]
    congestion: str
    carried: dict[str, Any]
    told: list[tuple[float, str, str]]


@contextlib.contextmanager
def played(
    scene: Scene, play: Play, *, seed: int = 0, congestion: str | None = None, keep: Path | None = None
) -> Iterator[Played]:
    """Play a scene; its folders exist until the context ends, or for ever in `keep`.

    Raises:
        NoInternetError: this machine does not let us make networks.
        RuntimeError: a command failed.
    """
    root = keep if keep is not None else Path(tempfile.mkdtemp(prefix="internet-"))
    processes: list[Process] = []
    try:
        with contextlib.ExitStack() as exits:
            internet = exits.enter_context(Internet(scene.sites, seed=seed, congestion=congestion))
            bootstrap = _process(root, "bootstrap", internet.places[scene.bootstrap], BUILT_IN_STATE / "bootstrap")
            processes.append(bootstrap)
            exits.callback(_end, processes)
            congestion_told = internet.congestion
            invite = _found(bootstrap, scene, play)
            trainers = {}
            for name, trainer in scene.trainers.items():
                trainers[name] = process = _process(root, name, internet.places[trainer.machine], STATES[play.how])
                processes.append(process)
                process.start(*_join_command(play, invite, process, trainer.port))
            began = time.time()
            said = _wait(play, _stage(internet, scene, trainers), trainers, processes, began)
            statuses = {process.name: process.status() for process in processes}
            ended, carried = time.time(), internet.look()
            _stop(processes)
        yield Played(
            scene=scene, play=play, began=began, ended=ended, bootstrap=bootstrap, trainers=trainers,
            statuses=statuses, congestion=congestion_told, carried=carried, told=said,
        )  # fmt: skip
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)


def _process(root: Path, name: str, place: Place, state: Path) -> Process:
    folder = root / name
    folder.mkdir(parents=True)
    return Process(name=name, place=place, folder=folder, state=folder / state)


def _found(bootstrap: Process, scene: Scene, play: Play) -> str:
    """Write the run file, start the bootstrap peer, and return the invite that it prints."""
    if play.how is How.COMMANDS:
        given = () if play.round_seconds is None else ("--rounds.round-seconds", str(play.round_seconds))
        bootstrap.ask(*PROGRAM, "new", *given)
    else:
        given = () if play.round_seconds is None else ("--round-seconds", str(play.round_seconds))
        islands, uplink = str(len(scene.trainers)), scene.uplink
        step = ("--step-seconds", str(play.step_seconds))
        bootstrap.ask(*LOOP, "new", ".", *step, "--islands", islands, "--uplink", uplink, *given)
    start = () if play.how is How.COMMANDS else ("--start", START_FILE)
    bootstrap.start(*PROGRAM, "bootstrap", "run.toml", "--public-name", scene.bootstrap_address, *start)
    assert bootstrap.running is not None, "it was started"
    until = time.monotonic() + INVITE_SECONDS
    while not (found := INVITE.search(bootstrap.log.read_text())):
        if time.monotonic() > until or bootstrap.running.poll() is not None:
            raise RuntimeError(f"bootstrap printed no invite: {bootstrap.told()}")
        time.sleep(0.2)
    return found[0]


def _join_command(play: Play, invite: str, process: Process, port: int | None) -> tuple[str, ...]:
    given = () if port is None else ("--port", str(port))
    if play.how is How.COMMANDS:
        return (*PROGRAM, "join", invite, *given)
    return (*LOOP, "join", invite, str(process.state), "--step-seconds", str(play.step_seconds), *given)


def _stage(internet: Internet, scene: Scene, trainers: dict[str, Process]) -> Stage:
    name, running = next((name, process.running) for name, process in list(trainers.items())[1:])
    assert running is not None, "it was started"
    site = next(site for site, plan in scene.sites.items() if scene.trainers[name].machine in plan.machines)
    return Stage(internet, site, running.pid)


def _wait(
    play: Play, stage: Stage, trainers: dict[str, Process], processes: list[Process], began: float
) -> list[tuple[float, str, str]]:
    """Wait until the end of a play while its trouble happens; return what the statuses said."""
    due = [] if play.trouble is None else sorted(play.trouble.timeline(play.seconds), key=lambda action: action[0])
    told: list[tuple[float, str, str]] = []
    last: dict[str, str] = {}
    try:
        while (since := time.time() - began) < play.seconds:
            while due and due[0][0] <= since:
                due.pop(0)[1](stage)
            for process in processes:
                if process.running is not None and process.running.poll() is not None:
                    process.ended_after = process.ended_after or since
            for name, trainer in trainers.items():
                sentence = trainer.status().get("trouble", "")
                said = re.sub(r"\d+", "N", sentence)  # a new number is no news
                if said != last.get(name, ""):
                    last[name] = said
                    told.append((since, name, sentence or "all is well"))
            time.sleep(1.0)
    finally:
        stage.end()
    return told


def _end(processes: list[Process]) -> None:
    for process in processes:
        process.end()


def _stop(processes: list[Process]) -> None:
    running = [process.running for process in reversed(processes) if process.running is not None]
    for process in running:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + END_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.1))
