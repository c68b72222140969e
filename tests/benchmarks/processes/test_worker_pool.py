"""A pool asks all workers together, names the one that failed, and leaves no process running."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.worker_pool import WorkerPool
from p2p_diloco.errors import NetworkError, PeerError, StateError
from tests.benchmarks.processes.bench_processes import Witness, is_alive

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]

# A worker with one child in its process group and one in its own session, which ends only if its parent dies.
ACTOR = """
import json, os, subprocess, sys, time
order = json.loads(sys.stdin.readline())
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(sleeper, start_new_session=alone) for alone in (False, True)]
for line in sys.stdin:
    word = json.loads(line)
    if word["do"] == "end":
        for child in children: child.kill()
        break
    if order["place"] == word.get("who"):
        if word["do"] == "die": print("alas", file=sys.stderr, flush=True); os._exit(3)
        if word["do"] == "sleep": time.sleep(60)
        if word["do"] == "fail": print(json.dumps({"error": "ValueError: no"}), flush=True); continue
    print(json.dumps({"place": order["place"], "big": "x" * 200_000 if word["do"] == "talk" else ""}), flush=True)
"""


def pool_in(folder: Path) -> WorkerPool:
    return WorkerPool("acting", [{}, {}], folder, command=("-c", ACTOR))


def test_answers_of_any_length_come_in_order(tmp_path: Path) -> None:
    witness = Witness()
    with pool_in(tmp_path) as pool:
        answers = pool.ask({"do": "talk"}, 20.0)
        witness.look()
        assert [answer["place"] for answer in answers] == [0, 1]
        assert all(len(answer["big"]) == 200_000 for answer in answers)
        assert [len(peer) for peer in pool.pids_by_peer()] == [3, 3]
    witness.check_all_gone()


@pytest.mark.parametrize(
    ("do", "error", "text"),
    [
        ("die", PeerError, "peer 1 of acting exited with code 3 during 'die'; .* last output: alas"),
        ("fail", StateError, "peer 1 of acting failed: ValueError: no"),
        ("sleep", NetworkError, "1 of 2 peers of acting did not answer 'sleep' within 1 s"),
    ],
)
def test_a_worker_that_fails_is_named_and_all_end(do: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    witness = Witness()

    def play() -> None:
        with pool_in(tmp_path) as pool:
            pool.ask({"do": "start"}, 20.0)
            pool.pids_by_peer()
            witness.look()
            pool.ask({"do": do, "who": 1}, 1.0 if do == "sleep" else 20.0)

    with pytest.raises(error, match=text):
        play()
    witness.check_all_gone()


def test_a_killed_worker_is_reported_by_the_next_command(tmp_path: Path) -> None:
    witness = Witness()

    def play() -> None:
        with pool_in(tmp_path) as pool:
            pool.ask({"do": "start"}, 20.0)
            victim = pool.pids_by_peer()[0][0]
            witness.look()
            psutil.Process(victim).kill()
            for _ in range(100):
                pool.ask({"do": "talk"}, 20.0)

    with pytest.raises(PeerError, match="peer 0 of acting was killed by signal 9 during 'talk'"):
        play()
    witness.check_all_gone()


def test_a_worker_that_may_end_is_not_waited_for(tmp_path: Path) -> None:
    witness = Witness()
    with pool_in(tmp_path) as pool:
        pool.ask({"do": "start"}, 20.0)
        pool.pids_by_peer()  # so that the pool knows the child that left the worker's group
        witness.look()
        for do in ("die", "talk"):
            answers = pool.ask({"do": do, "who": 1}, 20.0, may_end={1})
            assert [answer.get("place") for answer in answers] == [0, None]
    witness.check_all_gone()


PARENT = """
import sys, time
from pathlib import Path
from benchmarks.worker_pool import WorkerPool
order = {"num_peers": 2, "parameters": 64}
with WorkerPool("gloo_fp32", [order, order], Path(sys.argv[1]), worker="averaging.gloo_peer:GlooPeer") as pool:
    pool.ask({"do": "start"}, 60.0)
    print(*[pid for peer in pool.pids_by_peer() for pid in peer], pool.network.pid, flush=True)
    time.sleep(60)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        processes = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(processes) == 3
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.02)
