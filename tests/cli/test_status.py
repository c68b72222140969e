"""`status` reads the latest status of a peer, running or not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.owner import is_running
from p2p_diloco.status.status_file import STATUS_FILE, PeerStatus, write_status

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
