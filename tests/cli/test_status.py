"""`status` reads the latest status of a peer, running or not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.owner import is_running, watch_status
from p2p_diloco.status.status_file import STATUS_FILE, PeerLine, PeerStatus, write_status

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_json_holds_the_whole_status_and_whether_the_peer_runs(state: Path, capsys: Captured) -> None:
    write_status(state, PeerStatus(round=7, pid=os.getpid(), updated=time.time()))
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["running"], document["round"], document["peers"]) == (True, 7, [])


def test_the_table_shows_the_invite_in_one_piece(state: Path, capsys: Captured) -> None:
    invite = "p2pdiloco://" + "ab" * 200
    write_status(state, PeerStatus(round=7, pid=os.getpid(), updated=time.time(), invite=invite))
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert f'p2p-diloco join "{invite}"' in out
    assert "not running" not in out


def test_a_run_of_a_custom_model_is_joined_from_its_training_loop(state: Path, capsys: Captured) -> None:
    write_status(
        state, PeerStatus(round=7, pid=os.getpid(), updated=time.time(), invite="p2pdiloco://ab", own_model=True)
    )
    assert main(["status"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == 'p2p_diloco.join("p2pdiloco://ab", model, optimizer), from the training loop of the model'


def test_a_peer_that_is_not_running_is_reported(state: Path, capsys: Captured) -> None:
    write_status(state, PeerStatus(round=7, pid=os.getpid(), updated=time.time() - 7500))
    assert main(["status"]) == 0
    assert "this peer is not running; its latest status is from 2 h 05 min ago" in capsys.readouterr().out


def test_a_peer_that_has_written_nothing_for_a_while_is_not_shown_as_if_all_were_well(
    state: Path, capsys: Captured
) -> None:
    for seconds, is_told in ((5, False), (20, True)):
        write_status(state, PeerStatus(round=7, pid=os.getpid(), updated=time.time() - seconds))
        assert main(["status"]) == 0
        assert ("this peer has written no status for 20." in capsys.readouterr().out) is is_told


def test_a_broken_file_is_reported(state: Path, capsys: Captured) -> None:
    (state / STATUS_FILE).write_text("{")
    assert main(["status"]) == 2
    assert "cannot be read; was it written by another version?" in capsys.readouterr().err


def test_another_folder_can_be_named(tmp_path: Path, capsys: Captured) -> None:
    write_status(tmp_path, PeerStatus(round=9))
    assert main(["status", "--json", "--state_directory", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 9


@pytest.mark.parametrize(("error", "expected"), [(psutil.NoSuchProcess, False), (psutil.AccessDenied, True)])
def test_a_process_of_another_user_counts_as_running(
    error: type[psutil.Error], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(pid: int) -> psutil.Process:
        raise error(pid)

    monkeypatch.setattr(psutil, "Process", find)
    assert is_running(PeerStatus(pid=4711, updated=time.time())) is expected


def test_an_old_status_and_one_without_a_process_do_not_count_as_running() -> None:
    assert is_running(PeerStatus(pid=os.getpid(), updated=time.time()))
    assert not is_running(PeerStatus(pid=os.getpid(), updated=time.time() - 61.0))
    assert not is_running(PeerStatus(pid=0, updated=time.time()))


def changing(state: Path, *changes: PeerStatus) -> Callable[[float], None]:
    """Return a `sleep` that writes the next status each time, and ends with Ctrl-C."""
    left = list(changes)

    def sleep(seconds: float) -> None:
        assert seconds == 1.0
        if not left:
            raise KeyboardInterrupt
        write_status(state, left.pop(0))

    return sleep


def test_watching_as_json_prints_one_document_a_line_for_each_change(state: Path, capsys: Captured) -> None:
    first, second = (PeerStatus(round=n, pid=os.getpid(), updated=time.time()) for n in (7, 8))
    write_status(state, first)
    assert watch_status(state, as_json=True, sleep=changing(state, first, second)) == 0
    assert [json.loads(line)["round"] for line in capsys.readouterr().out.splitlines()] == [7, 8]


def test_watching_without_a_terminal_prints_a_line_for_each_round(state: Path, capsys: Captured) -> None:
    first, faster, second, ended = (
        PeerStatus(round=n, phase="training", tokens_per_second=rate, pid=pid, updated=time.time())
        for n, rate, pid in ((7, 1.0, os.getpid()), (7, 2.0, os.getpid()), (8, 1.0, os.getpid()), (8, 1.0, 0))
    )
    write_status(state, first)
    assert watch_status(state, as_json=False, sleep=changing(state, faster, second, ended)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines[:2]] == ["round 7", "round 8"]
    assert lines[2].startswith("this peer is not running")


def test_watching_needs_a_peer_that_has_run(tmp_path: Path, capsys: Captured) -> None:
    assert main(["status", "--watch", "--state-directory", str(tmp_path)]) == 2
    assert "no peer has run with the state directory" in capsys.readouterr().err


def test_without_a_terminal_the_status_is_plain_lines(state: Path, capsys: Captured) -> None:
    peer = PeerLine(peer="12D3KooWabcdefgh1111", ready=True, reachable=True, seconds_since_heard=0.4)
    write_status(state, PeerStatus(run_name="night", round=7, pid=os.getpid(), updated=time.time(), peers=(peer,)))
    assert main(["status"]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.startswith("night, trainer, round 7, connecting")
    assert last == "..efgh1111: ready, last seen 0.4 s ago"
