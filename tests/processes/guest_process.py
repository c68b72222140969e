"""A peer that `p2p-diloco join` starts beside a swarm, as on somebody's machine, and the commands of its owner."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from p2p_diloco.status.status_file import PeerStatus, read_status
from tests.swarm.process_swarm import PROJECT, ProcessSwarm

ROUND_SECONDS = 1.5
PATIENCE_SECONDS = 180.0
"""Importing torch takes half a minute on a busy machine."""


class GuestProcess:
    """`p2p-diloco join` in a process of its own, with its own folder for temporary files."""

    def __init__(self, swarm: ProcessSwarm, folder: Path, *flags: str, state: Path | None = None) -> None:
        self.state, self.temporary = state or folder / "state", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
        }
        words = ["--data", str(swarm.text), "--device", "cpu", "--threads", "1", "--evaluate-seconds", "0"]
        words += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self._command("join"), swarm.invite(), *words, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def _command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "p2p_diloco", name, "--state-directory", str(self.state)]

    def run(self, name: str, *words: str) -> str:
        """Run a command on this peer, and return what it prints."""
        return self.end(self.begin(name, *words))

    def begin(self, name: str, *words: str) -> subprocess.Popen[str]:
        command = [*self._command(name), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=self._environment)

    def end(self, command: subprocess.Popen[str]) -> str:
        said, complaint = command.communicate(timeout=90)
        assert command.returncode == 0, complaint
        return said

    @property
    def status(self) -> PeerStatus:
        return read_status(self.state) or PeerStatus()

    def until(self, what: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> float:
        """Wait until something is so; return when, in Unix seconds."""
        end = time.time() + seconds
        while not what():
            assert self.process.poll() is None, self.output.read_text()
            assert time.time() < end, self.output.read_text()
            time.sleep(0.02)
        return time.time()

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


def a_swarm() -> ProcessSwarm:
    return ProcessSwarm(round_seconds=ROUND_SECONDS, patience_seconds=PATIENCE_SECONDS)


@contextmanager
def guest(swarm: ProcessSwarm, folder: Path, *flags: str, company: Sequence[str] = ()) -> Iterator[GuestProcess]:
    swarm.start("boot", founds=True, trains=False)
    for name in company:
        swarm.start(name)
    found = GuestProcess(swarm, folder, *flags)
    try:
        found.until(lambda: found.status.phase == "training" and found.status.inner_steps > 0)
        if company:
            swarm.wait_for_whole_round(company, 1 + len(company), time.time())
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait()
