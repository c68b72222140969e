"""One play: a bootstrap peer and islands as real processes, the faults of a plan, and what is left at the end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.chaos.child_processes import OUTPUT_FILE, ChildProcesses
from benchmarks.chaos.faults import BOOTSTRAP, KINDS, RESTART_SECONDS, SPARED, Fault, name_of
from benchmarks.chaos.figures import Life, Played
from benchmarks.chaos.history import History
from benchmarks.chaos.paced_island import set_wall_clock
from benchmarks.meters import cpu_seconds, family_of, rss_bytes
from benchmarks.star_network import Direction, StarNetwork
from p2p_diloco.config.invite import SCHEME
from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.config.manifest import RunManifest, decode_signed_manifest
from p2p_diloco.config.rounds import FINAL_SHARE, RETAINED_SECONDS
from p2p_diloco.config.run_file import KEY_FILE, draft_manifest, write_run_toml
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import PeerId, parse_peer_id
from p2p_diloco.status.status_file import PeerStatus, read_status
from p2p_diloco.storage.run_folder import MANIFEST_FILE

FRAGMENTS = 2
STARTS = 3
"""Attempts to have all islands ready in time."""
STARTS_SLOWER = 1.3
"""Factor on the time that so many processes take to start at once."""
SETTLED_CYCLES = 4
"""Cycles before the measured time, in which all islands become ready."""
LAST_ROUNDS, QUIET_LAST_ROUNDS = 12, 2
"""Rounds after the measured time, in which the last restarted islands come back; without faults there are none."""
END_SECONDS = 20.0
DISK_MEGABYTES = 256
SOCKET_FOLDERS = "p2p-diloco-"
"""Beginning of the names of the folders in which peers have their daemons' sockets."""
_COLLECT_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_MEMORY_SECONDS = 2.0
_STATE = "state"
_CHUNK_BYTES = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """All that determines a play, except for its faults.

    Attributes:
        islands: number of islands.
        seconds: measured time.
        round_seconds: length of a round.
        step_seconds: length of an inner step of each island.
        start_seconds: time that all processes take to start.
        bootstrap_dies: whether the bootstrap peer is killed when the measured time begins, and stays dead.
        last_rounds: rounds after the measured time, at least.
    """

    islands: int
    seconds: float
    round_seconds: float
    step_seconds: float
    start_seconds: float
    bootstrap_dies: bool = False
    last_rounds: int = LAST_ROUNDS

    @property
    def window_at(self) -> float:
        """Seconds from the start of round 0 to the measured time."""
        return SETTLED_CYCLES * FRAGMENTS * self.round_seconds

    @property
    def last_round(self) -> int:
        """The round after which all peers end; the last of a cycle."""
        rounds = (self.window_at + self.seconds) / self.round_seconds + self.last_rounds
        return math.ceil(rounds / FRAGMENTS) * FRAGMENTS - 1

    def manifest(self, organiser: PeerId, clock_start: float) -> RunManifest:
        """Return the manifest of the run."""
        cycle = FRAGMENTS * self.round_seconds
        values: dict[str, Any] = {
            "model.size": "tiny",
            "rounds.clock_start": clock_start,
            "rounds.round_seconds": self.round_seconds,
            "rounds.fragments": FRAGMENTS,
            "rounds.planned_cycles": max(1, (self.last_round + 1) // FRAGMENTS),
            "outer.final_share": FINAL_SHARE,  # as `new --hours` would choose, and so is what follows
            "rounds.retained_cycles": int(-(-RETAINED_SECONDS // cycle)),
        }
        return draft_manifest(organiser=organiser, now_seconds=clock_start, name="chaos", values=values)


class NotReady(NetworkError):
    """Islands are not ready when the measured time begins."""


class Disks:
    """State directories on small file systems of their own, which can be filled. Leaving unmounts them.

    Attributes:
        are_own: whether this machine permits it.
    """

    def __init__(self) -> None:
        self.are_own = True
        self._mounted: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)

    def make(self, folder: Path) -> None:
        """Give a folder, which is created, a file system of its own, if that is permitted."""
        folder.mkdir(parents=True, exist_ok=True)
        if folder in self._mounted or not self.are_own:
            return
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "p2pd-chaos", str(folder)]
        try:
            self.are_own = not subprocess.run(command, capture_output=True, check=False).returncode
        except OSError:
            self.are_own = False
        if self.are_own:
            self._mounted.append(folder)

    @staticmethod
    def fill(folder: Path) -> Callable[[], None]:
        """Fill the file system of a folder to the last byte; return what frees it."""
        path = folder / "other-data"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(bytes(_CHUNK_BYTES)):
                pass
        return lambda: path.unlink(missing_ok=True)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One island, or the bootstrap peer: the name of its current process and its current life."""

    number: int
    name: str
    runs: bool = False
    life: Life | None = None
    stopped_at: float | None = None
    ends_expected: bool = False
    comers: Iterator[int] = field(default_factory=lambda: itertools.count(2))

    @property
    def island(self) -> str:
        return name_of(self.number)


class Play:
    """One play. `run` returns what is left.

    Args:
        children: the processes.
        network: the network, with a place for each peer and the bootstrap peer; None: the loopback of this machine.
        disks: the file systems of the state directories.
        show: prints a line.
    """

    def __init__(
        self,
        plan: ChaosPlan,
        faults: Sequence[Fault],
        *,
        children: ChildProcesses,
        network: StarNetwork | None,
        disks: Disks,
        show: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._faults = faults
        self._children = children
        self._network = network
        self._disks = disks
        self._show = show
        self._slots = {number: _Slot(number=number, name=name_of(number)) for number in range(plan.islands + 1)}
        self._lives: list[Life] = []
        self._kills: list[float] = []
        self._surprises: list[str] = []
        self._memory: list[tuple[float, float]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._invite = ""
        self._islands: dict[PeerId, tuple[str, Path]] = {}
        self._state_folders: dict[str, Path] = {}
        self._seen: set[psutil.Process] = set()
        self._unused_before = unused_shared_memory()

    def run(self) -> Played:
        """Play to the end.

        Raises:
            NetworkError: the bootstrap peer printed no invite, or the islands were not ready in time.
            StateError: the history of the run is incomplete.
        """
        plan = self._plan
        begin = time.time() + plan.start_seconds
        folder = self._children.folder("run")
        key = create_key_file(folder / KEY_FILE)
        write_run_toml(folder / "run.toml", plan.manifest(key.peer, float(round(begin))))
        self._start(BOOTSTRAP)
        self._invite = self._wait_for_invite()
        run = self._founded()
        self._history = History(self._children.folder("history"), run)
        window_at = run.rules.clock.begin(0) + plan.window_at
        self._window = (window_at, window_at + plan.seconds)
        for number in range(1, plan.islands + 1):
            self._start(number)
        self._schedule()
        machine_share = self._watch_to_end()
        last = run.rules.clock.begin(plan.last_round + 1)
        self._look_until(lambda: not any(slot.runs for slot in self._slots.values()), last + END_SECONDS)
        self._collect()
        islands = [slot for slot in self._slots.values() if slot.number != BOOTSTRAP]
        finished = {slot.island: self._status(slot) for slot in islands}
        digests = {name: one.state_digest for name, one in finished.items() if one.phase == "finished"}
        return Played(
            clock=run.rules.clock,
            window=self._window,
            inclusions=self._history.inclusions(self._islands),
            lives=self._lives,
            kills=self._kills,
            digests={name: digest for name, digest in digests.items() if digest},
            unfinished=[name for name in finished if not digests.get(name)],
            surprises=self._surprises,
            left_behind=self._left_behind(),
            memory=self._memory,
            machine_share=machine_share,
        )

    # -- processes

    def _start(self, number: int, *, restarts: bool = False) -> None:
        slot = self._slots[number]
        state = self._children.folder(slot.name) / _STATE
        self._disks.make(state)
        self._state_folders[slot.name] = state
        host = "127.0.0.1" if self._network is None else self._network.address_of(number)
        words = ["join", self._invite] if number != BOOTSTRAP else ["bootstrap", str(self._run_file())]
        words += ["--state-directory", str(state), "--host-maddrs", f"/ip4/{host}/tcp/0", "--no-port-mapping"]
        words += ["--until-round", str(self._plan.last_round), "--threads", "1", "--device", "cpu", "--with-parent"]
        if number != BOOTSTRAP:
            words += ["--evaluate-seconds", "0", "--keep-trace"]
        aside = str(self._aside(slot.name))
        entrance = () if self._network is None else self._network.entrance_of(number)
        program = (sys.executable, "-m", "benchmarks.chaos.paced_island", f"{self._plan.step_seconds:.6f}", aside)
        self._children.start(slot.name, words, (*entrance, *program))
        slot.runs, slot.ends_expected, slot.stopped_at = True, False, None
        if number != BOOTSTRAP:
            slot.life = Life(island=slot.island, started=time.time(), restarts=restarts)
            self._lives.append(slot.life)

    def _aside(self, name: str) -> Path:
        """Return the folder of what is not on the disk of the state directory: wall clock and trace."""
        return self._children.folder(f"aside-{name}")

    def _run_file(self) -> Path:
        return self._children.folder("run") / "run.toml"

    def _wait_for_invite(self) -> str:
        path = self._children.folder(name_of(BOOTSTRAP)) / OUTPUT_FILE
        deadline = time.time() + END_SECONDS
        while time.time() < deadline and self._children.exit_code(name_of(BOOTSTRAP)) is None:
            first, complete, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n")
            if complete:
                return next((word for word in shlex.split(first) if word.startswith(f"{SCHEME}://")), first)
            time.sleep(_LOOK_SECONDS)
        raise NetworkError(f"the bootstrap peer printed no invite; {self._last_words(name_of(BOOTSTRAP))}")

    def _founded(self) -> RunPlan:
        """Return the run that the bootstrap peer founded: its manifest names the founder, which `run.toml` does not."""
        (path,) = self._state_folders[name_of(BOOTSTRAP)].glob(f"*/{MANIFEST_FILE}")
        return plan_run(decode_signed_manifest(path.read_bytes()).manifest)

    def _last_words(self, name: str) -> str:
        path = self._children.folder(name) / OUTPUT_FILE
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        spoken = [line for line in lines if line.strip()]
        return f"its last line: {spoken[-1][:300]}" if spoken else "it printed nothing"

    def _status(self, slot: _Slot) -> PeerStatus:
        return read_status(self._state_folders[slot.name]) or PeerStatus()

    def _ended(self, slot: _Slot, code: int) -> None:
        """Record the end of a process, and start it again a little later."""
        now = time.time()
        slot.runs = False
        if slot.life is not None:
            slot.life.ended = now
            if slot.stopped_at is not None:
                slot.life.stops.append((slot.stopped_at, now))
        is_over = now >= self._window[1] + self._plan.last_rounds * self._plan.round_seconds
        if is_over or (slot.number == BOOTSTRAP and self._plan.bootstrap_dies):
            return
        if not slot.ends_expected:
            self._surprises.append(f"{slot.island} ended with code {code}; {self._last_words(slot.name)}")
            self._say(self._surprises[-1])
        self._in(RESTART_SECONDS, lambda: self._restart(slot))

    def _restart(self, slot: _Slot) -> None:
        self._start(slot.number, restarts=True)
        self._say(f"{slot.island} starts again")

    def _left_behind(self) -> list[str]:
        """Return the processes, temporary files and shared memory that peers left, now that all have ended."""
        _, alive = psutil.wait_procs(self._seen, timeout=END_SECONDS)
        sockets = self._children.folder("run").parent.glob(f"{SOCKET_FOLDERS}*")
        return [
            *(f"process {process.pid}" for process in alive),
            *(path.name for path in sockets),
            *sorted(unused_shared_memory() - self._unused_before),
        ]

    # -- faults

    def _schedule(self) -> None:
        begin, end = self._window
        for fault in self._faults:
            self._at(begin + fault.at, lambda fault=fault: self._break(fault))  # type: ignore[misc]
        if self._plan.bootstrap_dies:
            self._at(begin, lambda: self._kill(self._slots[BOOTSTRAP]))
        self._at(end, lambda: None)

    def _break(self, fault: Fault) -> None:
        slot = self._victim(fault)
        if slot is None:
            self._say(f"nobody is left for {fault.kind}")
            return
        self._say(f"{slot.island} {fault.text}")
        begin: dict[str, Callable[[], Callable[[], None] | None]] = {
            "kill": lambda: self._kill(slot),
            "bootstrap": lambda: self._kill(slot),
            "daemon": lambda: self._kill_daemon(slot),
            "leave": lambda: self._replace(slot),
            "stop": lambda: self._stop(slot),
            "cut": lambda: self._cut(slot, fault, "ingress", "egress"),
            "cut-in": lambda: self._cut(slot, fault, "ingress"),
            "cut-out": lambda: self._cut(slot, fault, "egress"),
            "router": lambda: self._close(slot),
            "clock": lambda: self._set_clock(slot, fault.ahead),
            "disk": lambda: self._disks.fill(self._state_folders[slot.name]),
        }
        ends = begin[fault.kind]()
        if ends is not None:
            self._at(min(time.time() + fault.seconds, self._window[1]), ends)

    def _victim(self, fault: Fault) -> _Slot | None:
        """Return the drawn victim, or the next island that runs, if that one does not."""
        if fault.victim == BOOTSTRAP:
            return self._slots[BOOTSTRAP] if self._slots[BOOTSTRAP].runs else None
        islands = self._plan.islands
        for step in range(islands):
            slot = self._slots[(fault.victim - 1 + step) % islands + 1]
            is_spared = KINDS[fault.kind].ends_process and slot.number == SPARED and islands > 2
            if slot.runs and slot.stopped_at is None and not is_spared:
                return slot
        return None

    def _kill(self, slot: _Slot) -> None:
        slot.ends_expected = True
        self._kills.append(time.time())
        self._children.kill(slot.name)

    def _kill_daemon(self, slot: _Slot) -> None:
        slot.ends_expected = True
        self._kills.append(time.time())
        for process in family_of(self._children.pid(slot.name)):
            with contextlib.suppress(psutil.Error):
                if "p2pd" in process.name():
                    process.kill()

    def _replace(self, slot: _Slot) -> None:
        """Let an island leave; another one with an identity of its own comes in its place."""
        slot.ends_expected = True
        os.kill(self._children.pid(slot.name), signal.SIGINT)

        def renamed() -> None:
            if slot.runs:
                self._in(_LOOK_SECONDS, renamed)
            else:
                slot.name = f"{slot.island}-{next(slot.comers)}"

        self._in(_LOOK_SECONDS, renamed)

    def _stop(self, slot: _Slot) -> Callable[[], None]:
        stopped = family_of(self._children.pid(slot.name))
        life, slot.stopped_at = slot.life, time.time()
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.suspend()

        def wake() -> None:
            for process in reversed(stopped):
                with contextlib.suppress(psutil.Error):
                    process.resume()
            if slot.life is life and slot.stopped_at is not None:
                if life is not None:
                    life.stops.append((slot.stopped_at, time.time()))
                slot.stopped_at = None

        return wake

    def _cut(self, slot: _Slot, fault: Fault, *directions: Direction) -> Callable[[], None]:
        assert self._network is not None, "faults of networks are only drawn with one"
        other = fault.other if fault.other != slot.number else None
        ends = [self._network.drop(slot.number, direction, other) for direction in directions]

        def end() -> None:
            for each in ends:
                each()

        return end

    def _close(self, slot: _Slot) -> Callable[[], None]:
        assert self._network is not None, "faults of networks are only drawn with one"
        return self._network.close_to_callers(slot.number)

    def _set_clock(self, slot: _Slot, ahead: float) -> Callable[[], None]:
        folder = self._aside(slot.name)
        set_wall_clock(folder, ahead)
        return lambda: set_wall_clock(folder, 0.0)

    # -- time

    def _at(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), action))

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(time.time() + seconds, action)

    def _watch_to_end(self) -> float:
        """Play the measured time and the rounds after it; return the share of the machine that the peers used."""
        begin, end = self._window
        self._look_until(lambda: False, begin)
        self._require_ready()
        before = self._cpu_seconds()
        self._look_until(lambda: False, end)
        used = sum(max(0.0, after - before.get(pid, 0.0)) for pid, after in self._cpu_seconds().items())
        self._look_until(lambda: False, end + self._plan.last_rounds * self._plan.round_seconds)
        return used / ((end - begin) * (os.cpu_count() or 1))

    def _require_ready(self) -> None:
        late = [
            slot.island for slot in self._slots.values() if slot.number != BOOTSTRAP and not self._status(slot).ready
        ]
        if late:
            raise NotReady(
                f"{', '.join(late)} did not become ready within {time.time() - self._lives[0].started:.0f} s; start "
                f"fewer islands, or stop what else runs on this machine ({self._last_words(late[0])})"
            )

    def _cpu_seconds(self) -> dict[int, float]:
        running = [slot.name for slot in self._slots.values() if slot.runs]
        pids = [process.pid for name in running for process in family_of(self._children.pid(name))]
        return {pid: cpu_seconds([pid]) for pid in pids}

    def _look_until(self, is_done: Callable[[], bool], at: float) -> None:
        next_collect = next_memory = 0.0
        while (now := time.time()) < at and not is_done():
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            for slot in self._slots.values():
                if slot.runs and (code := self._children.exit_code(slot.name)) is not None:
                    self._ended(slot, code)
            if now >= next_memory:
                next_memory = now + _MEMORY_SECONDS
                self._sample_memory(now)
            if now >= next_collect:
                next_collect = now + _COLLECT_SECONDS
                self._collect()
            time.sleep(_LOOK_SECONDS)

    def _sample_memory(self, now: float) -> None:
        slot = self._slots.get(SPARED)
        if self._plan.islands > 2 and slot is not None and slot.runs:
            pids = [process.pid for process in family_of(self._children.pid(slot.name))]
            self._memory.append((now, float(rss_bytes(pids))))

    def _collect(self) -> None:
        for slot in self._slots.values():
            if slot.runs:
                self._seen.update(family_of(self._children.pid(slot.name)))
        for name, folder in self._state_folders.items():
            self._history.collect(name, folder)
            status = read_status(folder)
            if status is not None and status.peer and name != name_of(BOOTSTRAP):
                island = "-".join(name.split("-")[:2])  # island-3-2 came for island-3
                self._islands[parse_peer_id(status.peer)] = (island, self._aside(name))

    def _say(self, text: str) -> None:
        self._show(f"{time.time() - self._window[0]:7.1f} s  {text}")


def seconds_to_start(processes: int) -> float:
    """Measure how long a process takes to start, and return how long so many take at once."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import benchmarks.chaos.paced_island"], capture_output=True, check=True)
    return STARTS_SLOWER * (time.monotonic() - began) * max(1.0, processes / (os.cpu_count() or 1))


def unused_shared_memory() -> set[str]:
    """Return the names of this machine's shared memory that no process has mapped; other programs may run here."""
    names = {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            names = {name for name in names if f"{_SHARED_MEMORY}/{name}" not in text}
    return names


def play(
    plan: ChaosPlan, faults: Sequence[Fault], *, network: StarNetwork | None, show: Callable[[str], None]
) -> Played:
    """Play once; begin again, with more time to start, if islands are not ready when the measured time begins.

    Raises:
        P2PDilocoError: it could not be played to the end.
    """
    for attempt in range(1, STARTS + 1):
        slower = replace(plan, start_seconds=plan.start_seconds * attempt)
        try:
            with ChildProcesses() as children, Disks() as disks:
                return Play(slower, faults, children=children, network=network, disks=disks, show=show).run()
        except NotReady as error:
            if attempt == STARTS:
                raise
            show(f"begins again: {error}")
    raise AssertionError("the last attempt returns or raises")
