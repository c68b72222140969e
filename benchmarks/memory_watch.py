"""Sampling of the resident memory of other processes, ten times a second, in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from benchmarks.meters import peak_rss_bytes, rss_bytes

LOOK_SECONDS = 0.1


class MemoryWatch:
    """Memory of groups of processes: peaks since they started, and averages since `begin_average`.

    Processes may come and go; the peak of an ended process still counts. Entering starts sampling, leaving stops it.

    Args:
        groups: returns the process ids of each group; the number and order of groups must not change.
    """

    def __init__(self, groups: Callable[[], Sequence[Sequence[int]]]) -> None:
        self._groups = groups
        self._peaks: list[dict[int, int]] = []
        self._held: list[list[int]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def begin_average(self) -> None:
        """Restart the averages."""
        with self._lock:
            self._held = [[] for _ in self._held]

    def look(self) -> None:
        """Take one sample, in addition to those of the thread."""
        groups = self._groups()
        with self._lock:
            self._peaks += [{} for _ in range(len(groups) - len(self._peaks))]
            self._held += [[] for _ in range(len(groups) - len(self._held))]
            for group, peaks, held in zip(groups, self._peaks, self._held, strict=True):
                for pid in group:
                    # Not the largest ever seen: a child shares its parent's memory until it calls exec.
                    peaks[pid] = peak_rss_bytes([pid]) or peaks.get(pid, 0)
                held.append(rss_bytes(group))

    def peaks(self) -> list[int]:
        """Return the sum of the peaks of each group's processes, in bytes."""
        with self._lock:
            return [sum(peaks.values()) for peaks in self._peaks]

    def averages(self) -> list[int]:
        """Return the average memory of each group, in bytes."""
        with self._lock:
            return [sum(held) // max(1, len(held)) for held in self._held]

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()
