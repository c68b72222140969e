"""Configure the C library's allocator in a peer's process."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from p2p_diloco.memory.heap import trim_heap

_M_ARENA_MAX = -8
TRIM_SECONDS = 30.0
"""Seconds between trims: often enough to limit fragmentation, rarely enough not to slow training."""


def share_one_arena() -> bool:
    """Make all threads of this process share one malloc arena; return whether the C library supports that.

    glibc gives each thread its own arena, and freed memory stays in it: with the threads of a peer (training, vectors,
    entries, evaluation, file access), 12 to 24 bytes per parameter were wasted. Vectors are large and few, so threads
    rarely wait for each other with a shared arena.

    Call this before starting threads: existing arenas are not removed.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


async def trim_now_and_then() -> None:
    """Return free heap pages to the system every `TRIM_SECONDS`, until cancelled."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim_heap)
