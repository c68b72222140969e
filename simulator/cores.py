"""Worker processes of simulations and experiments: count usable cores, and end workers with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading


def usable_cores() -> int:
    """Return the number of cores that this process may use; `taskset` and containers can exclude some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_parent() -> None:
    """End this pool worker when its parent process ends, for whatever reason.

    Workers of a killed parent otherwise finish their tasks, which can take hours, and then wait forever.
    """
    threading.Thread(target=_wait_for_end, name="parent", daemon=True).start()


def _wait_for_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process is not a pool worker"
    parent.join()
    os._exit(1)
