"""The text is the run's, and is never opened at a path chosen by somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import write_text

from p2p_diloco.app.text import run_text
from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.app.text.run_text import open_run_text
from p2p_diloco.config.manifest import DataSection
from p2p_diloco.errors import ConfigError


def test_the_local_copy_is_opened(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    assert open_run_text(DataSection(path="/elsewhere/words.txt"), str(path)).num_bytes == path.stat().st_size


def test_a_path_in_the_manifest_is_never_opened(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    with pytest.raises(ConfigError, match="give the path of your copy of that text with --data PATH"):
        open_run_text(DataSection(path=str(path)), None)


def test_the_standard_library_needs_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str | None] = []

    def note(path: str | None, *, held_out_share: float) -> object:
        asked.append(path)
        return open_corpus(write_text(tmp_path), held_out_share=held_out_share)

    monkeypatch.setattr(run_text, "open_corpus", note)
    open_run_text(DataSection(), None)
    assert asked == [None]


def test_the_held_out_share_is_that_of_the_manifest(tmp_path: Path) -> None:
    corpus = open_run_text(DataSection(held_out=0.25), str(write_text(tmp_path)))
    assert sum(stop - start for start, stop in corpus.held_out_parts) / corpus.num_bytes == pytest.approx(
        0.25, abs=0.01
    )


def test_the_same_text_has_the_expected_fingerprint(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    fingerprint = open_corpus(path).fingerprint.hex()
    assert open_run_text(DataSection(fingerprint=fingerprint), str(path)).fingerprint.hex() == fingerprint


def test_another_text_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    fingerprint = open_corpus(path).fingerprint.hex()
    path.write_text(path.read_text() + "one word more")
    text = rf"words\.txt has fingerprint [0-9a-f]{{16}}…, the run expects {fingerprint[:16]}…"
    with pytest.raises(ConfigError, match=text):
        open_run_text(DataSection(fingerprint=fingerprint), str(path))


def test_a_missing_copy_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_run_text(DataSection(), str(tmp_path / "missing.txt"))
