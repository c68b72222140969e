"""`p2p-diloco replay`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
sys.path.insert(0, str(Path(__file__).parents[1] / "peer"))

from recorded_run import TRAINERS, record
from small_run import peer_key

from p2p_diloco.cli.app import main
from p2p_diloco.config.key_file import write_key_file
from p2p_diloco.config.settings import IDENTITY_FILE


def test_a_run_is_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = record(tmp_path)
    for name in TRAINERS:
        write_key_file((stage.folder / name) / IDENTITY_FILE, peer_key(name))
    words = ["replay", *(str(stage.folder / name) for name in TRAINERS), "--data", str(stage.text)]
    assert main([*words, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["gap"] == 0.0
    assert figures["equal_entries"] == figures["entries"] > 0
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "+0.000 %" in printed
    assert "entries are equal, byte for byte" in printed
    assert sum(figures["steps_late"].values()) > 0
    assert f"steps per round: {figures['round_steps']:g};" in printed


def test_a_folder_that_is_not_a_state_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "is not a peer's state directory" in " ".join(capsys.readouterr().err.split())


def test_a_replay_without_folders_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 2
    assert "replay needs the state directories of the run's peers" in capsys.readouterr().err
