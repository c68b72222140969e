"""Free pages between those in use are returned to the system, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from p2p_diloco.memory.heap import trim_heap

# Every other chunk is freed, so that no free chunk can merge with its neighbour.
HOLES = """
import ctypes, resource, sys
sys.path[:0] = [{package!r}]
from p2p_diloco.memory.heap import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size, count = 100_000, 1_000
chunks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(count)]
for chunk in chunks: ctypes.memset(chunk, 7, size)
for chunk in chunks[::2]: libc.free(chunk)
def resident():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * resource.getpagesize()
before = resident()
assert trim_heap()
kept = all(ctypes.string_at(chunk, size) == bytes([7]) * size for chunk in chunks[1::2])
print((before - resident()) / (size * count / 2), kept)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="glibc's heap, and /proc"
)
def test_holes_are_returned_and_the_memory_around_them_stays() -> None:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    told = subprocess.run(
        [sys.executable, "-c", HOLES.format(package=package)], capture_output=True, text=True, check=True
    )
    share, kept = told.stdout.split()
    assert float(share) > 0.8, "all but the first and the last page of each hole"
    assert kept == "True"


def test_nothing_happens_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not trim_heap()
