"""A replay of a recorded run ends with the same bytes; an incomplete recording and another model are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from recorded_run import TRAINERS, Recorded, record
from small_run import peer_key

from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.config.key_file import write_key_file
from p2p_diloco.config.settings import IDENTITY_FILE
from p2p_diloco.errors import StateError
from p2p_diloco.ids import PeerId
from p2p_diloco.storage.trace import TRACE_FILE
from research.command import main
from research.recording import Recording, read_recording
from research.replay import Replay


def test_a_replay_with_joins_and_deaths_reproduces_every_entry(tmp_path: Path) -> None:
    stage = record(tmp_path)
    heard: list[tuple[int, int]] = []
    result = Replay(read_recording(stage.folders()), open_corpus(str(stage.text))).play(
        lambda done, of: heard.append((done, of))
    )
    assert result.entries > 40
    assert result.equal_entries == result.entries
    assert (result.gap, result.real_loss) == (0.0, result.replay_loss)
    assert result.islands == len(TRAINERS) + 1
    assert result.tokens > 1000
    assert heard[0][0] < heard[0][1]


def test_a_changed_contribution_changes_the_replay(tmp_path: Path) -> None:
    """Leave out half of a contribution's steps: every later entry differs."""
    stage = record(tmp_path)
    trace = stage.run_folder("ada").path / TRACE_FILE
    lines = trace.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"contributed"' in line)
    steps = int(lines[place].split('"steps":')[1].split(",")[0])
    lines[place] = lines[place].replace(f'"steps":{steps}', f'"steps":{steps // 2}')
    trace.write_text("\n".join(lines) + "\n")
    result = Replay(read_recording(stage.folders()), open_corpus(str(stage.text))).play()
    assert 0 <= result.equal_entries < result.entries
    assert result.gap != 0.0
    assert abs(result.gap) < 0.05


def test_a_replay_needs_each_change_of_the_batch(tmp_path: Path) -> None:
    stage = record(tmp_path)
    trace = stage.run_folder("ada").path / TRACE_FILE
    lines = trace.read_text().splitlines()
    assert {json.loads(line)["windows"] for line in lines if '"batch"' in line} == {1, 2, 4}
    place = next(i for i, line in enumerate(lines) if '"batch"' in line)
    trace.write_text("\n".join([*lines[:place], *lines[place + 1 :]]) + "\n")
    result = Replay(read_recording(stage.folders()), open_corpus(str(stage.text))).play()
    assert result.equal_entries < result.entries


def test_an_incomplete_recording_is_refused(tmp_path: Path) -> None:
    stage = record(tmp_path)
    corpus = open_corpus(str(stage.text))
    folders = stage.folders()
    missing = dict(list(folders.items())[:2])
    with pytest.raises(StateError, match=r"inconsistent: .* waits at line"):
        Replay(read_recording(missing), corpus).play()
    trace = stage.run_folder("ben").path / TRACE_FILE
    trace.write_text(trace.read_text() + '{"what":"slept"}\n')
    with pytest.raises(StateError, match="has the unknown record 'slept'"):
        Replay(read_recording(folders), corpus).play()


def command_of(stage: Recorded) -> list[str]:
    for name in TRAINERS:
        write_key_file(stage.folder / name / IDENTITY_FILE, peer_key(name))
    return ["replay", *(str(stage.folder / name) for name in TRAINERS), "--data", str(stage.text)]


@pytest.mark.long
def test_the_command_reports_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command_of(record(tmp_path))
    assert main([*words, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["gap"] == 0.0
    assert figures["equal_entries"] == figures["entries"] > 0
    target = tmp_path / "figures.json"
    assert main([*words, "--data-parallel", "--json", str(target)]) == 0
    printed, figures = capsys.readouterr().out, json.loads(target.read_text())
    assert "+0.000 %" in printed
    assert "entries are equal, byte for byte" in printed
    assert sum(figures["steps_late"].values()) > 0
    assert f"steps per round: {figures['round_steps']:g};" in printed
    assert figures["data_parallel_loss"] < 5.6
    assert f"data-parallel, as many tokens: {figures['data_parallel_loss']:.4f}; the swarm" in printed


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
    words = command_of(record(tmp_path))

    def other_model(folders: dict[PeerId, Path]) -> Recording:
        recording = read_recording(folders)
        return dataclasses.replace(recording, plan=dataclasses.replace(recording.plan, built_in=None))

    monkeypatch.setattr("research.replay.read_recording", other_model)
    monkeypatch.setattr("research.replay.Replay", None)
    assert main(words) == 2
    assert "does not train the built-in model; replay only builds that" in capsys.readouterr().err
