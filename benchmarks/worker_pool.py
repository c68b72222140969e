"""A pool of worker processes for one system: started, asked and ended together, child processes included."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

import p2p_diloco
from benchmarks.meters import family_of
from benchmarks.private_network import PrivateNetwork
from p2p_diloco.errors import NetworkError, PeerError, StateError

Word = dict[str, Any]
"""Message between parent and worker: one JSON object on one line."""

LOG_FILE = "output.log"
_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 15.0
_END_SECONDS = 10.0
_LAST_WORDS = 300


class Network(Protocol):
    """Network in which the workers of a pool run."""

    @property
    def interface(self) -> str:
        """Name of the interface that connects the workers."""
        ...

    @property
    def is_private(self) -> bool:
        """Whether no other process uses this network."""
        ...

    @property
    def pid(self) -> int:
        """Id of a process in this network."""
        ...

    def __enter__(self) -> Any:
        """Create the network."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the network."""
        ...

    def entrance_of(self, place: int) -> tuple[str, ...]:
        """Return the prefix of the command of the worker at `place`."""
        ...


class WorkerPool:
    """The peers of one system, each a process with its children. Entering starts them, leaving ends them all.

    Args:
        system: name of the system, sent to the workers.
        orders: first message for each worker, in addition to its place.
        root: folder in which each worker gets a folder.
        worker: module and class of the workers; see `benchmarks.worker`.
        command: arguments after the interpreter that start a worker, if not those.
        network: network of the workers; a private one by default. The pool enters and leaves it.
        interpreter: Python to use; one from another environment finds this package too.
    """

    def __init__(
        self,
        system: str,
        orders: Sequence[Mapping[str, Any]],
        root: Path,
        *,
        worker: str = "",
        command: Sequence[str] = (),
        network: Network | None = None,
        interpreter: str = sys.executable,
    ) -> None:
        self.system = system
        self.num_plays = 0
        """Turns played so far, including unmeasured ones; the caller increments it."""
        self.network = network if network is not None else PrivateNetwork()
        self._orders = orders
        self._root = root
        self._command = (interpreter, *(command or ("-m", "benchmarks.worker", worker)))
        self._workers: list[subprocess.Popen[bytes]] = []
        self._unread: list[bytes] = []
        self._seen: set[psutil.Process] = set()

    # -- starting and ending

    def __enter__(self) -> Self:
        self.network.__enter__()
        try:
            for place in range(len(self._orders)):
                self._workers.append(self._start(place))
                self._unread.append(b"")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._say_farewell()
        finally:
            self._end()

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        folder = self._root / f"{self.system}-{place}"
        folder.mkdir()
        environment = {
            **os.environ,
            "TMPDIR": str(self._root),
            "OMP_NUM_THREADS": "1",  # peers share the cores, so more threads would only wait for each other
            "GLOO_SOCKET_IFNAME": self.network.interface,
            "PYTHONPATH": _package_path(),
            "PYTHONUNBUFFERED": "1",
        }
        with (folder / LOG_FILE).open("ab") as log:
            worker = subprocess.Popen(
                [*self.network.entrance_of(place), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that one signal ends all its children
            )
        order = {"system": self.system, "place": place, "folder": str(folder), **self._orders[place]}
        with contextlib.suppress(BrokenPipeError):  # it has ended already; the next `ask` reports that
            _write(worker, order)
        return worker

    def _say_farewell(self) -> None:
        """Ask the workers to end, and give them time to clean up."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                _write(worker, {"do": "end"})
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(deadline - time.monotonic(), 0.0))

    def _end(self) -> None:
        """Kill all processes that still run, and wait until they have ended."""
        self._note_families()
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for worker in self._workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()
        psutil.wait_procs(self._seen, timeout=_END_SECONDS)
        self.network.__exit__(None, None, None)

    def _note_families(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                self._seen.update(family_of(worker.pid))

    # -- processes

    def pids_by_peer(self) -> list[list[int]]:
        """Return the process ids of each peer: the worker and its children."""
        self._note_families()
        return [[process.pid for process in family_of(worker.pid)] for worker in self._workers]

    # -- messages

    def ask(self, word: Mapping[str, Any], timeout_seconds: float, may_end: Collection[int] = ()) -> list[Word]:
        """Send an order to all workers and return the answer of each, in order.

        Args:
            may_end: places of workers that may end instead of answering; their answers are then empty.
        Raises:
            PeerError: another worker ended instead of answering.
            StateError: a worker reported that it failed.
            NetworkError: some workers did not answer in time.
        """
        for place, worker in enumerate(self._workers):
            try:
                _write(worker, word)
            except BrokenPipeError:
                worker.wait()
                if place not in may_end:
                    self._raise_ended(place, word)
        answers: dict[int, Word] = {}
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for place, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, place)
            while len(answers) < len(self._workers):
                for key, _ in selector.select(_LOOK_SECONDS):
                    self._read(key.data, answers, selector)
                self._check_living(answers, word, may_end)
                if time.monotonic() > deadline:
                    self._raise_silent(answers, word, timeout_seconds)
        return [answers[place] for place in range(len(self._workers))]

    def _read(self, place: int, answers: dict[int, Word], selector: selectors.BaseSelector) -> None:
        stdout = self._workers[place].stdout
        assert stdout is not None
        read = os.read(stdout.fileno(), 1 << 16)
        line, newline, rest = (self._unread[place] + read).partition(b"\n")
        if not read:
            selector.unregister(stdout)
        elif newline:
            self._unread[place] = rest
            answers[place] = json.loads(line)
            if "error" in answers[place]:
                raise StateError(f"peer {place} of {self.system} failed: {answers[place]['error']}")
        else:
            self._unread[place] = line

    def _check_living(self, answers: dict[int, Word], word: Mapping[str, Any], may_end: Collection[int]) -> None:
        for place, worker in enumerate(self._workers):
            if place not in answers and worker.poll() is not None:
                if place not in may_end:
                    self._raise_ended(place, word)
                answers[place] = {}

    def _raise_ended(self, place: int, word: Mapping[str, Any]) -> None:
        code = self._workers[place].returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise PeerError(
            f"peer {place} of {self.system} {how} during {word['do']!r}; all others were stopped; its last "
            f"output: {self._last_words(place)}"
        )

    def _raise_silent(self, answers: Mapping[int, Word], word: Mapping[str, Any], timeout_seconds: float) -> None:
        silent = [place for place in range(len(self._workers)) if place not in answers]
        raise NetworkError(
            f"{len(silent)} of {len(self._workers)} peers of {self.system} did not answer {word['do']!r} within "
            f"{timeout_seconds:.0f} s; last output of peer {silent[0]}: {self._last_words(silent[0])}; "
            "try again when the machine is less busy"
        )

    def _last_words(self, place: int) -> str:
        text = (self._root / f"{self.system}-{place}" / LOG_FILE).read_text(errors="replace").strip()
        return " | ".join(text[-_LAST_WORDS:].splitlines()) or "none"


def _package_path() -> str:
    """Return a PYTHONPATH with this package first, then the inherited paths."""
    package = str(Path(p2p_diloco.__file__).resolve().parent.parent)
    return os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])


def _write(worker: subprocess.Popen[bytes], word: Mapping[str, Any]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(word).encode() + b"\n")
    worker.stdin.flush()
