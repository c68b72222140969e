"""The lab's workers are real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.benchmarks.processes.bench_processes import is_alive

PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from simulator.cores import end_with_parent
context = multiprocessing.get_context({method!r})
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=context, initializer=end_with_parent) as pool:
        busy = [pool.submit(time.sleep, 60) for _ in range(2)]
        print(*pool._processes, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_end_when_their_parent_is_killed(method: str) -> None:
    program = textwrap.dedent(PARENT).format(method=method)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    try:
        assert parent.stdout is not None
        workers = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(is_alive, workers))
        parent.kill()
        deadline = time.monotonic() + 10
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.02)
    finally:
        parent.kill()
        for worker in filter(is_alive, workers):
            worker.kill()
        parent.communicate()
