"""`id` says who this machine's peer is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.ids import parse_peer_id, short_peer_id
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.storage.identity import read_name

Captured = pytest.CaptureFixture[str]


def printed(capsys: Captured, *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_the_first_call_makes_the_identity_and_later_ones_show_the_same(capsys: Captured, tmp_path: Path) -> None:
    first = printed(capsys, "id")
    assert first["short"] == short_peer_id(parse_peer_id(str(first["peer"])))
    assert first["name"] == ""
    assert printed(capsys, "id") == first
    assert main(["id"]) == 0
    assert capsys.readouterr().out == f"id     {first['peer']}\nshort  {first['short']}\nname   none\n"
    assert printed(capsys, "id", "--state-directory", str(tmp_path / "other"))["peer"] != first["peer"]


def test_a_name_is_set_shown_and_removed(capsys: Captured, tmp_path: Path) -> None:
    assert printed(capsys, "id", "--name", "ada [x]")["name"] == "ada [x]"
    assert read_name(tmp_path / "state") == "ada [x]"
    assert main(["id"]) == 0
    assert capsys.readouterr().out.endswith("name   ada [x]\n")
    assert printed(capsys, "id", "--name", "")["name"] == ""


def test_a_bad_name_is_refused_in_one_line_and_changes_nothing(capsys: Captured) -> None:
    printed(capsys, "id", "--name", "ada")
    assert main(["id", "--name", "a\x1b[2J\nb"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(r"p2p-diloco: error: 'a\x1b[2J\nb' is not a name: it holds a line break")
    assert error.count("\n") == 1
    assert printed(capsys, "id")["name"] == "ada"


def test_a_peer_that_runs_takes_a_new_name_at_its_next_start(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    write_status(tmp_path / "state", PeerStatus(pid=os.getpid(), updated=time.time(), name="old"))
    assert main(["id", "--name", "new"]) == 0
    assert "takes this name at its next start" in capsys.readouterr().out
