"""How the C library hands out memory in a peer's process."""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8


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
