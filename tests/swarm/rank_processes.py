"""Islands of several ranks in real processes; each writes what it has found to a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("island_rank.py")
PATIENCE_SECONDS = 150.0


class RankProcesses:
    """The processes of one island.

    Args:
        folder: theirs; a new one, or that of an island to start again.
        count: number of ranks.
        order: see `island_rank.py`.
    """

    def __init__(self, folder: Path, count: int, task: str, **order: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.count = folder, count
        starts = len(list(folder.glob("order-*.json")))
        for old in (*folder.glob("said-*.json"), *folder.glob("began-*")):
            old.unlink()
        words = {"folder": str(folder), "store": str(folder / f"store-{starts}"), "count": count, "task": task, **order}
        path = folder / f"order-{starts}.json"
        path.write_text(json.dumps(words))
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(path), str(rank)],
                cwd=Path(__file__).parents[2],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def wait_until_begun(self) -> None:
        """Wait until all ranks are in the run."""
        until = time.monotonic() + PATIENCE_SECONDS
        while len(list(self.folder.glob("began-*"))) < self.count:
            ended = [process for process in self.processes if process.poll() not in (None, 0)]
            assert not ended, self.errors()
            assert time.monotonic() < until, "the ranks do not begin"
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def end(self, *ranks: int, patience_seconds: float = PATIENCE_SECONDS) -> list[int]:
        """Wait until these ranks have ended, by default all; return their exit codes."""
        chosen = ranks or tuple(range(self.count))
        return [self.processes[rank].wait(patience_seconds) for rank in chosen]

    def said(self) -> list[dict[str, Any]]:
        """Wait until all ranks have ended well; return what each has found."""
        assert self.end() == [0] * self.count, self.errors()
        return [self.found(rank) for rank in range(self.count)]

    def found(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"said-{rank}.json").read_text())
        return found

    def errors(self) -> str:
        """Return what the ranks have printed; ends them."""
        self.close()
        return "\n".join(process.stderr.read() for process in self.processes if process.stderr is not None)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.wait()


@contextmanager
def rank_processes(folder: Path, count: int, task: str, **order: Any) -> Iterator[RankProcesses]:
    """Run an island inside the block."""
    island = RankProcesses(folder, count, task, **order)
    try:
        yield island
    finally:
        island.close()
        for process in island.processes:
            if process.stderr is not None:
                process.stderr.close()
