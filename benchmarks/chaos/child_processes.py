"""Child processes that never outlive this one: peers of a benchmark, each with its own session and folder."""

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
from typing import Self

import psutil

from p2p_diloco.config.settings import ENVIRONMENT_PREFIX
from p2p_diloco.errors import StateError

OUTPUT_FILE = "output.log"
_END_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildProcesses:
    """Child processes by name. Leaving the block always kills all of them and removes all files.

    If this process itself is killed, the children notice and exit (see `p2p_diloco/app/cli/ranks.py`).
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "p2p_diloco")) -> None:
        self._command = tuple(command)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._root: Path | None = None
        self._handlers: dict[signal.Signals, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            # SIGHUP stays ignored under nohup. SIGINT is taken even if a shell's "&" set it to ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _interrupt)
        try:
            # The name is short because the daemons' sockets are inside, and a socket path has at most 107 characters.
            self._root = Path(tempfile.mkdtemp(prefix="p2pd-bench-"))
        except OSError as error:
            raise StateError(f"cannot make a temporary folder: {error.strerror}; is the disk full?") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not leave some of them running.
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            self._end_all()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal returned it

    def folder(self, name: str) -> Path:
        """Return the folder of `name`; create it at the first call."""
        assert self._root is not None, "enter first"
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, name: str, arguments: Sequence[str], command: Sequence[str] | None = None) -> None:
        """Start a child; its output goes to `output.log` in its folder.

        Args:
            command: the program and what comes before it; None: that of all children.
        """
        assert self._root is not None, "enter first"
        # The settings in this shell's environment are not for these peers.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
        environment |= {"TMPDIR": str(self._root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder(name) / OUTPUT_FILE).open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [*(command or self._command), *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to this process alone; its own children must notice by themselves."""
        self._processes[name].kill()
        self._processes[name].wait()

    def pid(self, name: str) -> int:
        """Return the process id of a child, which may have exited."""
        return self._processes[name].pid

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
        # The daemons' janitors clean up at the same time; a file that is already gone is not an error.
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
    """Return whether a process still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
