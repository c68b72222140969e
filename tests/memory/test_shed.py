"""Pages of a library that are dropped are read back unchanged, and only unmodified file pages are dropped."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from p2p_diloco.codec import vectors
from p2p_diloco.memory.heap import shed_compiler, unwritten

MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 fe:00 11 /x/lib/libllvmlite.so
Rss:                   4 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
7f0000001000-7f0000003000 r-xp 00001000 fe:00 11 /x/lib/libllvmlite.so
Anonymous:             0 kB
7f0000003000-7f0000004000 r--p 00003000 fe:00 11 /x/lib/libllvmlite.so
Anonymous:             4 kB
7f0000004000-7f0000005000 rw-p 00004000 fe:00 11 /x/lib/libllvmlite.so
Anonymous:             0 kB
7f0000005000-7f0000006000 r-xs 00004000 fe:00 11 /x/lib/libllvmlite.so
Anonymous:             0 kB
7f0000006000-7f0000007000 r-xp 00000000 fe:00 12 /x/lib/libother.so
Anonymous:             0 kB
7f0000007000-7f0000008000 rw-p 00000000 00:00 0
Anonymous:             0 kB
7f0000008000-7f0000009000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
"""


def test_only_unwritten_file_pages_are_dropped() -> None:
    assert list(unwritten(MAPS, "libllvmlite")) == [
        (0x7F0000000000, 0x7F0000001000),
        (0x7F0000001000, 0x7F0000003000),
    ]


def resident_kib(library: str) -> int:
    total, is_library = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split(" ")[0]:
                is_library = library in line
            elif is_library and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_loops_work_and_more_can_be_compiled_after_the_compiler_is_dropped() -> None:
    from numba import njit

    loops = vectors.compiled_loops()
    assert loops is not None
    assert njit(lambda x: x + 2)(40) == 42  # another test of this process may have dropped it already
    before = resident_kib("libllvmlite")
    shed_compiler()
    assert resident_kib("libllvmlite") < before - 16 * 1024
    vector_N = np.arange(64, dtype=np.float32)
    assert loops.sum_of_squares(vector_N) == float((vector_N.astype(np.float64) ** 2).sum())
    assert njit(lambda x: x + 1)(41) == 42
    assert resident_kib("libllvmlite") > 0
