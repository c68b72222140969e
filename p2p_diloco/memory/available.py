"""The memory of this machine that a process can have: all of it and what is free, within the limits on the process.

Limits are those of control groups (containers, Slurm, systemd) and of the address space (`ulimit -v`). What is free is
never underestimated knowingly: it includes swap, and files that the system only caches.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process could use if no other program ran."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still get. On systems that grow their swap as needed, this is the total.

    Args:
        root: folder of `proc` and `sys`.
    """
    if sys.platform != "linux":
        return total_memory(root)
    free = int(psutil.virtual_memory().available)
    return max(min([free, *(limit - used for limit, used in _limits(root))]) + int(psutil.swap_memory().free), 0)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield each limit on this process with what is used of it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit, psutil.Process().memory_info().vms
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = root / "sys/fs/cgroup", _VERSION_2
        if controllers:
            base, names = base / "memory", _VERSION_1
        own = base / path.lstrip("/")
        # A limit of a group holds for all groups in it. In a container, the path may be the host's, and only the top
        # is there.
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(base))):
            maximum, used = (_text(folder / name).strip() for name in names)
            if maximum.isdecimal() and used.isdecimal():
                yield int(maximum), int(used) - _cached_files(folder)


def _cached_files(folder: Path) -> int:
    """Return the bytes of a control group, and of all in it, that the system can free at once."""
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    sizes = {name: int(size) for name, size in lines}
    files = sum(sizes.get(f"total_{kind}_file", sizes.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
    return files + sizes.get("slab_reclaimable", 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
