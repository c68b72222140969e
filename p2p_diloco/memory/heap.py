"""Keep the process small: one arena for the C library's heap, and pages that nobody needs back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_M_ARENA_MAX = -8
TRIM_SECONDS = 30.0
"""Seconds between trims: often enough to limit fragmentation, rarely enough not to slow training."""
_ADVICE_DONT_NEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)", re.ASCII)
_MAPS = Path("/proc/self/smaps")
COMPILER = "libllvmlite"


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


def shed_compiler() -> None:
    """Release the mapped pages of numba's compiler; if they are needed again, they are read from the file.

    To load loops, numba maps 65 MB of its compiler into the process, which are not used again. The kernel would reclaim
    them only under memory pressure.

    Only unwritable, unmodified pages are released, which equal the file's contents. Does nothing except on Linux.
    """
    if sys.platform != "linux" or not _MAPS.exists():
        return
    for start, stop in unwritten(_MAPS.read_text(), COMPILER):
        advise(start, stop - start, _ADVICE_DONT_NEED)


def advise(start: int, length: int, advice: int) -> None:
    """Announce to the kernel how pages will be used; one that does not know the advice does nothing."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call(start, length, advice)


def unwritten(maps: str, library: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of a library's mappings that are not writable and have no private pages.

    Args:
        maps: the contents of `/proc/self/smaps`.
        library: prefix of the library's file name.
    """
    here: tuple[int, int] | None = None
    for line in maps.splitlines():
        mapping = _MAPPING.fullmatch(line)
        if mapping is not None:
            is_library = Path(mapping[4]).name.startswith(library)
            # Private and not writable; a page of a shared mapping may be the only copy.
            is_fixed = mapping[3] in ("r-xp", "r--p")
            here = (int(mapping[1], 16), int(mapping[2], 16)) if is_library and is_fixed else None
        elif here is not None and line.startswith("Anonymous:"):
            if int(line.split()[1]) == 0:
                yield here
            here = None
