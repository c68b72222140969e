"""A release tells its digests and notes, and what a person must still know."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from release import __main__ as release
from release.archives import Project

PROJECT = Project(
    version="0.2.0",
    requires_python=">=3.11",
    classifiers=frozenset({"Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"}),
    scripts={},
    files=frozenset(),
    section="0.2.0",
    notes="- one",
)


def test_digests_and_notes_lie_beside_the_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "DIST", tmp_path)
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    release.write_papers([wheel], PROJECT)
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"
    assert (tmp_path / "RELEASE_NOTES.md").read_text() == "# p2p_diloco 0.2.0\n\n- one\n"


def test_pythons_that_were_not_tried_or_are_not_claimed_and_a_draft_are_named() -> None:
    assert release.last_lines(["3.11", "3.12"], PROJECT) == []
    lines = release.last_lines(["3.11", "3.13"], replace(PROJECT, section="Unreleased"))
    assert lines[:2] == ["Python 3.12 is claimed, but was not tried", "Python 3.13 was tried, but is not claimed"]
    assert "newest section is Unreleased; name it 0.2.0 to release" in lines[2]


def test_a_missing_python_is_named_as_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert not release.try_out("9.9", Path("a.whl"), Path("a.tar.gz"), PROJECT)
    assert capsys.readouterr().out == "Python 9.9: SKIPPED, not on this machine\n"


def test_faults_end_the_program_with_a_sentence_each() -> None:
    with pytest.raises(SystemExit, match="this is no release:\none\ntwo"):
        release.stop_at(["one", "two"])
