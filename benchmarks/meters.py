"""The resources that processes have used, as Linux counts them: cores, bytes on loopback, memory at its peak."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_KIB = 1024
_CLOCK_OF_PROCESS = 2
"""Of `clock_getcpuclockid(3)`: the clock of all threads of a process, those that have ended told."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return what these processes have had of all cores, user and system; one that is gone counts nothing.

    The kernel's clock of a process, for the ticks of `/proc/<pid>/stat` are 10 ms long: as much as a peer needs.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | _CLOCK_OF_PROCESS)
    return total


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started, and these; nothing once it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def forget_peaks(pids: Iterable[int]) -> None:
    """Let the peaks of these processes' memory begin again with what they hold now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of these processes' peaks of resident memory; what several share counts for each of them."""
    return sum(_status_of(pid, "VmHWM:") for pid in pids)


def rss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of these processes' resident memory now; what several share counts for each of them."""
    return sum(_status_of(pid, "VmRSS:") for pid in pids)


def _status_of(pid: int, field: str) -> int:
    """Return a size that the kernel tells of a process, in bytes; 0 once it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * _KIB
    return 0


def loopback_bytes(pid: int) -> int:
    """Return what was sent over the loopback interface of the network that process `pid` lives in."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return sent_bytes(counters)
    raise AssertionError("every network of Linux has a loopback interface")


def sent_bytes(counters: str) -> int:
    """Return the bytes sent, of what follows the colon in a line of `/proc/net/dev`: eight figures are of receiving."""
    return int(counters.split()[8])
