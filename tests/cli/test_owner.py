"""`pause`, `resume`, `limits` and `leave` write what the owner asks for, and say how the peer answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from p2p_diloco.app.cli import owner
from p2p_diloco.app.cli.app import main
from p2p_diloco.guest.owner_files import Control, MonthTraffic, read_control, write_control, write_traffic
from p2p_diloco.guest.pause_rule import month_of
from p2p_diloco.status import owner_requests
from p2p_diloco.status.status_file import PeerStatus, write_status

Captured = pytest.CaptureFixture[str]
MONTH = month_of(datetime.now().astimezone())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def run(*words: str, state: Path) -> int:
    return main([*words, "--state-directory", str(state)])


def running(**fields: object) -> PeerStatus:
    return replace(PeerStatus(pid=os.getpid(), updated=time.time(), phase="training"), **fields)  # type: ignore[arg-type]


@contextmanager
def peer_that_answers(state: Path, answer: Callable[[Control], dict[str, object]]) -> Iterator[None]:
    """Answer as a peer does: with a status that carries the number of the request."""
    write_status(state, running())
    over = threading.Event()

    def look() -> None:
        seen = read_control(state).number
        while not over.is_set():
            control = read_control(state)
            if control.number != seen:
                seen = control.number
                write_status(state, running(control=control.number, **answer(control)))
            over.wait(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_pause_and_resume_report_the_answer(state: Path, capsys: Captured) -> None:
    def answer(control: Control) -> dict[str, object]:
        return {"paused": "paused until 14:00 (asked)", "pause_reason": "asked"} if control.pauses else {}

    with peer_that_answers(state, answer):
        assert run("pause", "--for", "2h", state=state) == 0
        until = read_control(state).pauses_until
        assert until == pytest.approx(time.time() + 7200, abs=60)
        assert capsys.readouterr().out == "paused until 14:00 (asked); it follows the run, and makes no steps\n"
        assert run("resume", state=state) == 0
        assert capsys.readouterr().out == "running again\n"
    assert not read_control(state).pauses


def test_resume_says_that_another_limit_still_holds(state: Path, capsys: Captured) -> None:
    with peer_that_answers(state, lambda control: {"paused": "paused until 22:00 (hours)", "pause_reason": "hours"}):
        assert run("resume", state=state) == 0
    assert capsys.readouterr().out == "still paused until 22:00 (hours)\n"


@pytest.mark.parametrize("command", ["pause", "resume", "leave"])
def test_a_peer_that_does_not_run_cannot_be_asked(command: str, state: Path, capsys: Captured) -> None:
    assert run(command, state=state) == 2
    write_status(state, running(phase="finished"))
    assert run(command, state=state) == 2
    assert f"no peer is running with the state directory {state}" in capsys.readouterr().err
    assert read_control(state) == Control()


def test_a_peer_that_does_not_answer_is_reported(
    state: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_requests, "ANSWER_SECONDS", 0.1)
    write_status(state, running())
    assert run("pause", state=state) == 4
    assert "the peer has not answered within 0.1 s; the request stays in" in capsys.readouterr().err


def test_a_wrong_duration_is_refused_before_anything_is_asked(state: Path, capsys: Captured) -> None:
    write_status(state, running())
    assert run("pause", "--for", "long", state=state) == 2
    assert "--for is 'long'; expected a time with its unit" in capsys.readouterr().err
    assert read_control(state) == Control()


def test_limits_of_a_running_peer_are_changed_and_shown(state: Path, capsys: Captured) -> None:
    def answer(control: Control) -> dict[str, object]:
        return {"limits": control.limits, "month": MONTH, "month_sent": 3_000_000_000, "month_received": 1_000_000_000}

    with peer_that_answers(state, answer):
        assert run("limits", "--max-upload", "5mbit", "--monthly-quota", "500GB", state=state) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "running"
        assert lines[1].split() == ["max-upload", "5", "Mbit/s"]
        assert f"used in {MONTH}: 3.0 GB sent, 1.0 GB received, 4.0 GB of the quota" in lines
        assert run("limits", "--hours", "22:00-07:00", "--json", state=state) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["limits"] == {"max_upload": "5mbit", "monthly_quota": "500GB", "hours": "22:00-07:00"}
    assert (shown["running"], shown["month_sent"]) == (True, 3_000_000_000)


def test_limits_of_a_peer_that_does_not_run_are_kept_for_its_next_start(state: Path, capsys: Captured) -> None:
    write_traffic(state, MonthTraffic(month=MONTH, sent=2e9, received=1e9))
    write_control(state, Control(number="1", leaves=77))
    assert run("limits", "--days", "sat,sun", state=state) == 0
    assert capsys.readouterr().out.startswith("not running; these limits apply at the next start")
    control = read_control(state)
    assert (control.limits, control.leaves) == ({"days": "sat,sun"}, 0)
    assert run("limits", "--json", state=state) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["limits"], shown["month_sent"], shown["disk_used"] > 0) == ({"days": "sat,sun"}, 2_000_000_000, True)


def test_a_wrong_limit_is_refused_and_changes_nothing(state: Path, capsys: Captured) -> None:
    assert run("limits", "--hours", "at night", state=state) == 2
    assert "hours in the command line: it is 'at night'; expected two different times" in capsys.readouterr().err
    assert read_control(state) == Control()


def test_limits_need_a_state_directory(tmp_path: Path, capsys: Captured) -> None:
    assert run("limits", state=tmp_path / "none") == 2
    assert "no peer has run with the state directory" in capsys.readouterr().err


def test_leave_waits_until_the_process_has_ended(state: Path, capsys: Captured) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_status(state, running(pid=process.pid))

    def end_when_asked() -> None:
        while read_control(state).leaves != process.pid:
            time.sleep(0.01)
        process.communicate()

    thread = threading.Thread(target=end_when_asked)
    thread.start()
    assert run("leave", state=state) == 0
    thread.join()
    assert "the peer has left after" in capsys.readouterr().out
    assert process.returncode is not None


def test_leave_returns_once_the_peer_of_an_own_loop_has_finished(state: Path, capsys: Captured) -> None:
    with peer_that_answers(state, lambda control: {"phase": "finished", "own_model": True}):
        assert run("leave", state=state) == 0
    assert "the program that it ran in goes on" in capsys.readouterr().out


def test_leave_reports_a_peer_that_hangs(state: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LEAVE_SECONDS", 0.1)
    write_status(state, running())
    assert run("leave", state=state) == 4
    assert f"process {os.getpid()} has not ended within 0.1 s" in capsys.readouterr().err
