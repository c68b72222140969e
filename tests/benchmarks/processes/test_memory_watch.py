"""Memory of processes is measured from outside: peaks over all time, averages from a given moment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.memory_watch import MemoryWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")

MIB = 1024 * 1024
HOLDER = """
import sys
block = bytearray(b"1") * (96 << 20)
print("peak", flush=True)
sys.stdin.readline()
del block
print("rest", flush=True)
sys.stdin.readline()
"""


def test_a_peak_is_kept_after_it_is_over_and_after_its_process_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    with child, MemoryWatch(lambda: [[os.getpid()], [child.pid]]) as watch:
        child.stdout.readline()
        watch.look()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        watch.begin_average()
        watch.look()
        assert watch.peaks()[1] - watch.averages()[1] > 80 * MIB
        child.kill()
        child.wait()
        watch.look()
        assert watch.peaks()[1] > 96 * MIB
    assert watch.peaks()[0] >= watch.averages()[0] > 0
