"""How the C library hands out memory in a peer's process."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from p2p_diloco.memory.heap import trim_heap

_M_ARENA_MAX = -8
TRIM_SECONDS = 30.0
"""Between two looks for holes: often enough that few come together, seldom enough that training does not notice."""


def share_one_arena() -> bool:
    """Have all threads of this process take memory from one place; tell whether the C library knows how.

    glibc gives each thread an arena of its own, and what a thread gave back stays in its arena: with the threads of a
    peer (training, vectors, entries, evaluation, and those that read and write files) that came to 12 to 24 bytes for
    each parameter which nobody used. Vectors are large and few, so threads hardly ever wait for each other here.

    To be called before there are threads: arenas that exist are not taken away.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


async def trim_now_and_then() -> None:
    """Give what is free between things in use back to the system, every `TRIM_SECONDS`, until cancelled."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim_heap)
