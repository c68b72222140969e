"""Checks that no process started by a benchmark is left."""

from __future__ import annotations

import time

import psutil


class Witness:
    """Remembers all child processes of this one, and theirs."""

    def __init__(self) -> None:
        self.seen: set[psutil.Process] = set()

    def look(self) -> None:
        self.seen.update(psutil.Process().children(recursive=True))

    def check_all_gone(self, patience_seconds: float = 10.0) -> None:
        assert self.seen, "nothing was ever started"
        deadline = time.monotonic() + patience_seconds
        while alive := [process for process in self.seen if is_alive(process)]:
            assert time.monotonic() < deadline, f"left behind: {alive}"
            time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
