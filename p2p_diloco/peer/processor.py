"""How a peer's threads share the cores with each other and with inner steps."""

from __future__ import annotations

import os


def wake_politely() -> bool:
    """Have what this thread starts from now on wait for its turn when it wakes; tell whether the system knows how.

    By itself Linux interrupts a running thread for one that has just got something to do. On a thin line each packet
    wakes the libp2p daemon so, 11,000 times a cycle of ten million parameters, in the middle of an inner step. As a
    batch process it comes a few milliseconds later and finds several packets: a third of its work, and steps that are
    not slowed. On a core that is idle nothing changes.

    To be called before there are threads or children: both inherit it. Somebody's own choice (`chrt`) stays.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        is_others = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_others:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a container that forbids it, a C library that cannot
        return False
    return is_others
