"""A twin of a recorded run holds the very bytes of the real one, and a recording that is not whole is said to be so."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import TRAINERS, record

from p2p_diloco.errors import StateError
from p2p_diloco.replay.recording import read_recording
from p2p_diloco.replay.twin import Twin
from p2p_diloco.storage.diary import DIARY_FILE
from p2p_diloco.training.data import open_corpus


def test_a_twin_of_joins_and_deaths_makes_every_entry_again(tmp_path: Path) -> None:
    stage = record(tmp_path)
    heard: list[tuple[int, int]] = []
    result = Twin(read_recording(stage.folders()), open_corpus(str(stage.text))).play(
        lambda done, of: heard.append((done, of))
    )
    assert result.entries > 40
    assert result.equal_entries == result.entries
    assert (result.gap, result.real_loss) == (0.0, result.twin_loss)
    assert result.islands == len(TRAINERS) + 1
    assert result.tokens > 1000
    assert heard[0][0] < heard[0][1]


def test_what_an_island_did_otherwise_shows(tmp_path: Path) -> None:
    """Half of a contribution's steps left out: every entry from there on differs."""
    stage = record(tmp_path)
    diary = stage.run_folder("ada").path / DIARY_FILE
    lines = diary.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"contributed"' in line)
    steps = int(lines[place].split('"steps":')[1].split(",")[0])
    lines[place] = lines[place].replace(f'"steps":{steps}', f'"steps":{steps // 2}')
    diary.write_text("\n".join(lines) + "\n")
    result = Twin(read_recording(stage.folders()), open_corpus(str(stage.text))).play()
    assert 0 <= result.equal_entries < result.entries
    assert result.gap != 0.0
    assert abs(result.gap) < 0.05


def test_a_recording_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    stage = record(tmp_path)
    corpus = open_corpus(str(stage.text))
    folders = stage.folders()
    missing = dict(list(folders.items())[:2])
    with pytest.raises(StateError, match=r"inconsistent: .* waits at line"):
        Twin(read_recording(missing), corpus).play()
    diary = stage.run_folder("ben").path / DIARY_FILE
    diary.write_text(diary.read_text() + '{"what":"slept"}\n')
    with pytest.raises(StateError, match="has the unknown record 'slept'"):
        Twin(read_recording(folders), corpus).play()
