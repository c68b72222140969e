"""Processes for simulations and experiments: how many cores they have; none outlives who started it."""

from __future__ import annotations

import multiprocessing
import os
import threading


def usable_cores() -> int:
    """Return how many cores this process may use: `taskset` and containers leave some of the machine's out."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_parent() -> None:
    """End this worker of a pool when the process that started it is gone, however that ended.

    A pool whose parent was killed goes on with what it was given, for hours, and then waits for ever.
    """
    threading.Thread(target=_wait_for_end, name="parent", daemon=True).start()


def _wait_for_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no worker"
    parent.join()
    os._exit(1)
