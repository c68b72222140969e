"""The sensors of a machine. The battery is replaced, because the test machines have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from p2p_diloco.guest import sensors
from p2p_diloco.guest.sensors import folder_bytes, free_bytes, on_battery


@pytest.mark.parametrize(
    ("battery", "runs_on_it"),
    [(None, False), *((SimpleNamespace(power_plugged=plug), plug is False) for plug in (True, None, False))],
)
def test_only_a_battery_that_is_not_plugged_in_counts(
    battery: object, runs_on_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert on_battery() is runs_on_it


def test_a_system_without_the_sensor_has_no_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert not on_battery()


def test_the_size_of_a_folder_is_what_its_files_take(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path) == 0
    (tmp_path / "run").mkdir()
    for name, size in (("one", 100_000), ("run/two", 50_000)):
        (tmp_path / name).write_bytes(os.urandom(size))
    assert 150_000 <= folder_bytes(tmp_path) < 175_000
    assert free_bytes(tmp_path) > 0


def test_the_priority_of_all_threads_and_children_is_lowered() -> None:
    script = (
        "import os, subprocess, sys, threading\n"
        "from p2p_diloco.guest.sensors import lower_priority\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "assert lower_priority(19) == ''\n"
        "tasks = os.listdir('/proc/self/task') if sys.platform == 'linux' else [0]\n"
        "found = {os.getpriority(os.PRIO_PROCESS, int(task)) for task in tasks}\n"
        "found.add(os.getpriority(os.PRIO_PROCESS, child.pid))\n"
        "child.communicate()\n"
        "print(found)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{19}"


def test_a_priority_that_may_not_be_raised_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(sensors.os, "setpriority", refuse)
    assert sensors.lower_priority(0).startswith("cannot set the priority to 0: only an administrator")
