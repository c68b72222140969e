"""Processes that never outlive us: peers of the demo, each in a session and a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self

import psutil

from p2p_diloco.config.settings import ENVIRONMENT_PREFIX
from p2p_diloco.errors import StateError

OUTPUT_FILE = "output.log"
_END_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Children(Protocol):
    """Processes by name, each with a folder; real ones here, simulated ones in tests."""

    def folder(self, name: str) -> Path:
        """Return the folder of `name`; it exists."""
        ...

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `p2p-diloco` with `arguments`."""
        ...

    def kill(self, name: str) -> None:
        """End it without a chance to say anything, as `kill -9` does."""
        ...

    def exit_code(self, name: str) -> int | None:
        """Return how it ended; None while it runs."""
        ...


class ChildProcesses:
    """Real children. Leaving ends every one of them and removes every file, whatever happened.

    Should this process itself be killed, the children notice (see `parent.py`).
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "p2p_diloco")) -> None:
        self._command = tuple(command)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._root: Path | None = None
        self._handlers: dict[signal.Signals, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            # Whoever said nohup means it. An interrupt counts even where a shell's "&" had it ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _interrupt)
        try:
            # The short name matters: sockets of the daemons lie within, and their paths may have 107 characters.
            self._root = Path(tempfile.mkdtemp(prefix="p2pd-demo-"))
        except OSError as error:
            raise StateError(f"cannot make a temporary folder: {error.strerror}; is the disk full?") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An impatient second Ctrl-C must not leave half of them behind.
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            self._end_all()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave

    def folder(self, name: str) -> Path:
        """Return the folder of `name`; it is made when first asked for."""
        assert self._root is not None, "enter first"
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start a child; what it prints goes to `output.log` in its folder."""
        assert self._root is not None, "enter first"
        # Settings of this shell are not meant for these peers.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
        environment |= {"TMPDIR": str(self._root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder(name) / OUTPUT_FILE).open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to that process alone; what it started must notice by itself."""
        self._processes[name].kill()
        self._processes[name].wait()

    def exit_code(self, name: str) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._processes[name].poll()

    def _end_all(self) -> None:
        living = [child for process in self._processes.values() for child in _family(process.pid)]
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for child in self._processes.values():
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        while any(map(_is_alive, living)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._remove_files()

    def _remove_files(self) -> None:
        root, self._root = self._root, None
        deadline = time.monotonic() + _END_SECONDS
        # Daemons' janitors tidy up at the same moment; what vanishes under our hands is no error.
        while root is not None and root.exists():
            shutil.rmtree(root, ignore_errors=True)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    """Say whether a process still runs; one that is dead but that nobody has collected does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
