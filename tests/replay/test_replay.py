"""A replay of a recorded run ends with the same bytes, and an incomplete recording is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import TRAINERS, record

from p2p_diloco.errors import StateError
from p2p_diloco.replay.recording import read_recording
from p2p_diloco.replay.replay import Replay
from p2p_diloco.storage.trace import TRACE_FILE
from p2p_diloco.training.data import open_corpus


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
