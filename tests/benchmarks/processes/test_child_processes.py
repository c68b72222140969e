"""Neither children of a benchmark nor their files outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.child_processes import OUTPUT_FILE, ChildProcesses

# Starts a grandchild in its own session, as peers start their daemon, and prints its process id.
FAMILY = (
    sys.executable,
    "-c",
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
    "print(child.pid, *sys.argv[1:], flush=True); time.sleep(60)",
)


def output_of(children: ChildProcesses, name: str) -> list[str]:
    """Return the words of the first line once it is complete."""
    path = children.folder(name) / OUTPUT_FILE
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        first, complete, _ = path.read_text().partition("\n")
        if complete:
            return first.split()
        time.sleep(0.02)
    raise AssertionError("the child said nothing")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process outlived the benchmark"
        time.sleep(0.02)


def test_leaving_ends_the_whole_family_and_removes_the_folder() -> None:
    with ChildProcesses(FAMILY) as children:
        children.start("peer-1", ["join", "here"])
        grandchild, *words = output_of(children, "peer-1")
        root = children.folder("peer-1").parent
        assert words == ["join", "here"]
        assert children.exit_code("peer-1") is None
    wait_until_dead(int(grandchild))
    assert children.exit_code("peer-1") == -signal.SIGKILL
    assert not root.exists()


def fail_with_children(started: list[int]) -> None:
    with ChildProcesses(FAMILY) as children:
        children.start("peer-1", [])
        started.append(int(output_of(children, "peer-1")[0]))
        raise ZeroDivisionError


def test_an_exception_leaves_no_process_either() -> None:
    started: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail_with_children(started)
    wait_until_dead(*started)


def test_a_kill_ends_only_one_process() -> None:
    with ChildProcesses((sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")) as children:
        for name in ("peer-1", "peer-2"):
            children.start(name, [])
            output_of(children, name)
        children.kill("peer-1")
        assert children.exit_code("peer-1") == -signal.SIGKILL
        assert children.exit_code("peer-2") is None


def test_settings_of_this_shell_do_not_reach_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_DILOCO_PORT", "1")
    code = "import os; print('P2P_DILOCO_PORT' in os.environ, os.environ['OMP_NUM_THREADS'], os.environ['TMPDIR'])"
    with ChildProcesses((sys.executable, "-c", code)) as children:
        children.start("peer-1", [])
        assert output_of(children, "peer-1") == ["False", "1", str(children.folder("peer-1").parent)]


BENCHMARK = """
    import signal, time
    from benchmarks.chaos.child_processes import ChildProcesses

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it runs in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with ChildProcesses({command!r}) as children:
        children.start("peer-1", [])
        while not (first := (children.folder("peer-1") / "output.log").read_text()).endswith("\\n"):
            time.sleep(0.02)
        print(children.folder("peer-1").parent, first.split()[0], flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process_and_no_file(number: signal.Signals) -> None:
    script = textwrap.dedent(BENCHMARK).format(command=FAMILY)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        root, grandchild = process.stdout.readline().decode().split()
        assert Path(root).is_dir()
        process.send_signal(number)
        process.wait(timeout=20)
    assert not Path(root).exists()
    wait_until_dead(int(grandchild))
