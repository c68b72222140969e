"""Release pages of a library that is no longer needed.

To load loops, numba maps 65 MB of its compiler into the process, which are not used again. The kernel would reclaim
them only under memory pressure.
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
    """Release the mapped pages of numba's compiler; if they are needed again, they are read from the file.

    Only unwritable, unmodified pages are released, which equal the file's contents. Does nothing except on Linux.
    """
    if sys.platform != "linux" or not _MAPS.exists():
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in unwritten(_MAPS.read_text(), COMPILER):
        advise(start, stop - start, _ADVICE_DONT_NEED)


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
