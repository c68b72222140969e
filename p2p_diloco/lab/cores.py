"""How many cores there are for the lab's processes."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many cores this process may use: `taskset` and containers leave some of the machine's out."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
