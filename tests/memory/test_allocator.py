"""All threads share one arena once a process has asked for it, and its free pages are returned at intervals."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from p2p_diloco.memory import heap
from p2p_diloco.memory.heap import TRIM_SECONDS, share_one_arena, trim_now_and_then
from simulator.virtual_time import run_virtual

# malloc_info lists the heaps, one <heap> for each arena.
ARENAS = """
import ctypes, os, sys, tempfile, threading
sys.path[:0] = [{package!r}]
if {shares}:
    from p2p_diloco.memory.heap import share_one_arena
    assert share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
begun = threading.Barrier(5)
def work():
    libc.malloc(1 << 16)
    begun.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
begun.wait()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as told:
    stream = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(told.read().count(b"<heap"))
"""


def num_arenas(*, shares: bool) -> int:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    told = subprocess.run(
        [sys.executable, "-c", ARENAS.format(shares=shares, package=package)],
        env={name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout)


@pytest.mark.skipif(
    sys.platform != "linux" or "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="arenas are glibc's"
)
def test_threads_share_an_arena_after_share_one_arena() -> None:
    assert num_arenas(shares=False) > 1
    assert num_arenas(shares=True) == 1


def test_nothing_happens_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not share_one_arena()


def test_free_pages_are_returned_at_intervals_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed_at: list[float] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(heap, "trim_heap", lambda: trimmed_at.append(loop.time()))
        began = loop.time()
        task = asyncio.ensure_future(trim_now_and_then())
        await asyncio.sleep(3.5 * TRIM_SECONDS)
        task.cancel()
        await asyncio.sleep(2.0 * TRIM_SECONDS)
        assert [round((at - began) / TRIM_SECONDS, 3) for at in trimmed_at] == [1.0, 2.0, 3.0]

    run_virtual(scene())
