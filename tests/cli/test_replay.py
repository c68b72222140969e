"""`p2p-diloco replay`."""

from __future__ import annotations

import dataclasses
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
from p2p_diloco.ids import PeerId
from p2p_diloco.replay.recording import Recording, read_recording


@pytest.mark.long
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


def test_a_run_of_another_model_is_refused_before_its_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may be a function of the organiser's, to which nobody here agreed."""
    stage = record(tmp_path)
    for name in TRAINERS:
        write_key_file((stage.folder / name) / IDENTITY_FILE, peer_key(name))

    def other_model(folders: dict[PeerId, Path]) -> Recording:
        recording = read_recording(folders)
        return dataclasses.replace(recording, plan=dataclasses.replace(recording.plan, built_in=None))

    monkeypatch.setattr("p2p_diloco.cli.replay.read_recording", other_model)
    monkeypatch.setattr("p2p_diloco.cli.replay.Replay", None)
    assert main(["replay", *(str(stage.folder / name) for name in TRAINERS), "--data", str(stage.text)]) == 2
    assert "does not train the built-in model; replay only builds that" in capsys.readouterr().err
