"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p_diloco.storage.whole_file import replace_file, sync_file


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two"):
        replace_file(path, lambda draft, content=content: draft.write_bytes(content))  # type: ignore[misc]
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fill_the_disk(draft: Path) -> None:
        draft.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, fill_the_disk)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_an_old_draft_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_bytes(b"left by a crash")
    replace_file(tmp_path / "file", lambda draft: draft.write_bytes(b"whole") and None)
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_synchronised_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("p2p_diloco.storage.whole_file.sync_file", lambda path: order.append(path.name))
    monkeypatch.setattr(Path, "replace", lambda self, target: order.append(f"replace {target.name}"))
    replace_file(tmp_path / "file", lambda draft: draft.write_bytes(b"whole") and None)
    assert order == [".file.part", "replace file", tmp_path.name]


def test_files_and_folders_can_be_synchronised(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    sync_file(tmp_path / "file")
    sync_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_file(tmp_path / "missing")
