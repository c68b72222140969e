"""Batch scheduling applies to the process that asks for it and everything it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from p2p_diloco.app.cli.peer_process import wake_politely

SCENE = """
import os, subprocess, sys, threading
sys.path[:0] = [{package!r}]
from p2p_diloco.app.cli.peer_process import wake_politely
{before}
print(wake_politely(), os.sched_getscheduler(0))
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
thread.start(); thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True)
print(seen[0], int(child.stdout))
"""

needs_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch processes are Linux's")


def played(before: str = "") -> list[str]:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    scene = SCENE.format(package=package, before=before)
    return subprocess.run([sys.executable, "-c", scene], capture_output=True, text=True, check=True).stdout.split()


@needs_linux
def test_threads_and_children_inherit_batch_scheduling() -> None:
    batch = str(os.SCHED_BATCH)
    usual = "os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))"  # another test may have changed this process
    assert played(usual) == ["True", batch, batch, batch]


@needs_linux
def test_a_policy_chosen_before_is_kept() -> None:
    idle = str(os.SCHED_IDLE)
    assert played("os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))") == ["False", idle, idle, idle]


@needs_linux
def test_a_forbidden_change_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    assert not wake_politely()
    monkeypatch.setattr(os, "sched_getscheduler", forbid)
    assert not wake_politely()


def test_nothing_happens_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    assert not wake_politely()
