"""Resource usage of processes as Linux counts it: CPU time, bytes on loopback, peak memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_KIB = 1024
_CLOCK_OF_PROCESS = 2
"""Clock type as in `clock_getcpuclockid(3)`: all threads of a process, including those that have ended."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes on all cores, user and system. An ended process counts as zero.

    Uses the kernel's clock of a process. The ticks of `/proc/<pid>/stat` are 10 ms long, as much as a peer needs.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | _CLOCK_OF_PROCESS)
    return total


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; an empty list if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def forget_peaks(pids: Iterable[int]) -> None:
    """Reset the memory peaks of these processes to their current memory."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the peaks of these processes' resident memory; shared memory counts once per process."""
    return sum(_status_of(pid, "VmHWM:") for pid in pids)


def rss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of these processes' current resident memory; shared memory counts once per process."""
    return sum(_status_of(pid, "VmRSS:") for pid in pids)


def _status_of(pid: int, field: str) -> int:
    """Return a size from the kernel's status of a process, in bytes; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * _KIB
    return 0


def loopback_bytes(pid: int) -> int:
    """Return the bytes sent over the loopback interface in the network of process `pid`."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return sent_bytes(counters)
    raise AssertionError("every network of Linux has a loopback interface")


def sent_bytes(counters: str) -> int:
    """Return the bytes sent, given a line of `/proc/net/dev` after the colon; eight receive fields come first."""
    return int(counters.split()[8])
