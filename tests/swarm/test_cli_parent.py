"""A child that asked for it ends with its parent, however the parent ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

CHILD = (
    "import time; from p2p_diloco.app.cli.ranks import end_with_parent; end_with_parent(); print('up', flush=True); "
)
WAIT = "time.sleep(60)"


def test_a_child_ends_when_the_pipe_closes() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD + WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"up\n"
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(timeout=10) == 1


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = (
        f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {CHILD + WAIT!r}], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True); child.stdout.readline(); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        # If nobody reaps orphans, it stays a zombie, which counts as ended.
        gone, alive = psutil.wait_procs([child], timeout=10)
        assert gone or alive[0].status() == psutil.STATUS_ZOMBIE
