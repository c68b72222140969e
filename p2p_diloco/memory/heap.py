"""Return free pages of the C library's heap to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> bool:
    """Return whole free pages to the system; return whether the C library supports that.

    By default glibc only returns free memory at the end of the heap. A long-lived allocation, such as an entry, takes
    the place of a gradient that was freed between two steps; the next gradient then fits only at the end, and the hole
    stays with the process. A returned page costs nothing until it is used again.

    Other threads that allocate must wait meanwhile, 30 to 110 ms at 40M parameters on a busy core, and reused pages are
    zeroed first. So call this occasionally, not at every step.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
