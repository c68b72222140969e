"""Lets go of pages of a library that was needed once.

What numba reads of its compiler to load loops stays in a process's memory, and nothing uses it again: 65 MB. The kernel
would take it back only when memory runs short.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ADVICE_DONT_NEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)", re.ASCII)
_MAPS = Path("/proc/self/smaps")
COMPILER = "libllvmlite"


def shed_compiler() -> None:
    """Give back what is mapped of numba's compiler; what is needed again comes from the file, as it did at first.

    Only pages that cannot be written and never were: they are what the file holds. Does nothing but on Linux.
    """
    if sys.platform != "linux" or not _MAPS.exists():
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in unwritten(_MAPS.read_text(), COMPILER):
        advise(start, stop - start, _ADVICE_DONT_NEED)


def unwritten(maps: str, library: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of a library's mappings that nobody can write and that hold no page of this process's own.

    Args:
        maps: what Linux tells in `/proc/self/smaps`.
        library: how its file's name begins.
    """
    here: tuple[int, int] | None = None
    for line in maps.splitlines():
        mapping = _MAPPING.fullmatch(line)
        if mapping is not None:
            is_library = Path(mapping[4]).name.startswith(library)
            # Private, for a shared mapping's pages may be somebody's only copy; and not to be written.
            is_fixed = mapping[3] in ("r-xp", "r--p")
            here = (int(mapping[1], 16), int(mapping[2], 16)) if is_library and is_fixed else None
        elif here is not None and line.startswith("Anonymous:"):
            if int(line.split()[1]) == 0:
                yield here
            here = None
