"""All worker processes of one system: started, spoken to and ended together, with all that they started."""

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
"""What parent and workers say to each other: one JSON object, one line."""

LOG_FILE = "output.log"
_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 15.0
_END_SECONDS = 10.0
_LAST_WORDS = 300


class Network(Protocol):
    """Where workers live."""

    @property
    def interface(self) -> str:
        """By which they reach each other."""
        ...

    @property
    def is_private(self) -> bool:
        """Whether nobody else is in it."""
        ...

    @property
    def pid(self) -> int:
        """A process that lives in it."""
        ...

    def __enter__(self) -> Any:
        """Make it."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        ...

    def entrance_of(self, place: int) -> tuple[str, ...]:
        """Return what a worker's command must begin with."""
        ...


class WorkerPool:
    """One system's peers, each a process with what it starts. Enter to start, leave to end every one of them.

    Args:
        system: by name; the workers are told.
        orders: what each worker is told first, beside its place.
        root: a folder for theirs.
        command: what a worker is: the words after the interpreter's name.
        network: where they live; one of their own where none is given. The pool enters and leaves it.
        interpreter: of Python; one of another environment finds this package as this one does.
    """

    def __init__(
        self,
        system: str,
        orders: Sequence[Mapping[str, Any]],
        root: Path,
        *,
        command: Sequence[str],
        network: Network | None = None,
        interpreter: str = sys.executable,
    ) -> None:
        self.system = system
        self.num_plays = 0
        """Turns of this pool, those that do not count too; who speaks to it counts."""
        self.network = network if network is not None else PrivateNetwork()
        self._orders = orders
        self._root = root
        self._command = (interpreter, *command)
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
            "OMP_NUM_THREADS": "1",  # peers share the cores; threads of one would only wait for those of others
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
                start_new_session=True,  # so that all that it starts can be ended by one signal
            )
        order = {"system": self.system, "place": place, "folder": str(folder), **self._orders[place]}
        with contextlib.suppress(BrokenPipeError):  # it ended at once; whoever asks it for something hears that
            _write(worker, order)
        return worker

    def _say_farewell(self) -> None:
        """Let the workers tidy up."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                _write(worker, {"do": "end"})
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(deadline - time.monotonic(), 0.0))

    def _end(self) -> None:
        """Kill what still lives of all that was started, and wait until it is gone."""
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

    # -- what they have

    def pids_by_peer(self) -> list[list[int]]:
        """Return the processes of each peer: its own and those that it started."""
        self._note_families()
        return [[process.pid for process in family_of(worker.pid)] for worker in self._workers]

    # -- talking

    def ask(self, word: Mapping[str, Any], timeout_seconds: float, may_end: Collection[int] = ()) -> list[Word]:
        """Send an order to all workers and return the answer of each, in order.

        Args:
            may_end: places of those that may end instead; their answers are empty then.
        Raises:
            PeerError: another worker ended instead of answering.
            StateError: a worker says that it failed.
            NetworkError: some have not answered in time.
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
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise PeerError(
            f"peer {place} of {self.system} {how} when it was to {word['do']}; all others were ended too; its last "
            f"words: {self._last_words(place)}"
        )

    def _raise_silent(self, answers: Mapping[int, Word], word: Mapping[str, Any], timeout_seconds: float) -> None:
        silent = [place for place in range(len(self._workers)) if place not in answers]
        raise NetworkError(
            f"{len(silent)} of {len(self._workers)} peers of {self.system} did not {word['do']} within "
            f"{timeout_seconds:.0f} s; last words of peer {silent[0]}: {self._last_words(silent[0])}; "
            "try again on a machine with less to do"
        )

    def _last_words(self, place: int) -> str:
        text = (self._root / f"{self.system}-{place}" / LOG_FILE).read_text(errors="replace").strip()
        return " | ".join(text[-_LAST_WORDS:].splitlines()) or "none"


def _package_path() -> str:
    """Return where Python must look for this package, and then where it was told to."""
    package = str(Path(p2p_diloco.__file__).resolve().parent.parent)
    return os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])


def _write(worker: subprocess.Popen[bytes], word: Mapping[str, Any]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(word).encode() + b"\n")
    worker.stdin.flush()
