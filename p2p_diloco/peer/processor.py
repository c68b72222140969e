"""Scheduling of a peer's threads, so that they do not interrupt inner steps."""

from __future__ import annotations

import os


def wake_politely() -> bool:
    """Use batch scheduling for this thread and everything it starts; return whether that is active.

    By default Linux preempts a running thread when another one wakes. On a slow connection, every packet thus wakes the
    libp2p daemon in the middle of an inner step, 11,000 times per cycle of ten million parameters. As a batch process,
    the daemon runs a few milliseconds later and finds several packets: it needs a third of the CPU time and does not
    slow steps down. On an idle core nothing changes.

    Call this before starting threads or children, which inherit it. A policy set by the user (`chrt`) is kept.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        is_others = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_others:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # forbidden in this container, or missing in the C library
        return False
    return is_others
