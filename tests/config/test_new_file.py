"""Files that cannot be recreated are written once, whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from p2p_diloco.config import new_file
from p2p_diloco.config.new_file import check_new_folder, write_new_file, write_new_folder
from p2p_diloco.errors import ConfigError, StateError


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_new_file_has_its_content_and_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_new_file(path, b"words", mode=mode)
    assert path.read_bytes() == b"words"
    assert stat.S_IMODE(path.stat().st_mode) & mode == stat.S_IMODE(path.stat().st_mode)
    assert os.listdir(path.parent) == ["file"], "no draft is left"


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError) as caught:
        write_new_file(path, b"words", mode=0o600)
    assert str(caught.value) == f"{path} already exists and is never overwritten; move it away, or name another file"
    assert path.read_bytes() == b"precious"


def test_the_second_of_two_concurrent_writers_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_new_file(path, b"first", mode=0o600)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(ConfigError, match="already exists"):
        write_new_file(path, b"second", mode=0o600)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")]
)
def test_a_failing_disk_is_reported_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, reason)

    monkeypatch.setattr(new_file.os, "fsync", refuse)
    with pytest.raises(StateError) as caught:
        write_new_file(tmp_path / "file", b"words", mode=0o600)
    assert str(caught.value) == (
        f"cannot write {tmp_path / 'file'}: {reason}; check the folder and the disk, or name another file"
    )
    assert os.listdir(tmp_path) == []


def test_a_path_below_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="cannot write"):
        write_new_file(tmp_path / "file" / "deeper", b"words", mode=0o600)


FILES = {"config.json": b"{}", "weights": bytes(100)}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_folder_has_its_files_and_nothing_else(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "deep" / "er"
    if is_there:
        path.mkdir(parents=True)
    write_new_folder(path, FILES)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert os.listdir(path.parent) == ["er"], "no draft is left"


def test_a_folder_that_is_not_empty_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"words")
    with pytest.raises(ConfigError) as caught:
        write_new_folder(tmp_path, FILES)
    assert str(caught.value) == f"{tmp_path} is not empty, and nothing in it is overwritten; name a new folder"
    assert os.listdir(tmp_path) == ["precious"]


def test_files_created_meanwhile_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "precious").write_bytes(b"words")
    monkeypatch.setattr(new_file, "check_new_folder", lambda path: None)
    with pytest.raises(StateError, match=r"cannot write the folder .*: Directory not empty; check the disk, or name"):
        write_new_folder(path, FILES)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(path) == ["precious"]


def test_a_file_and_the_current_directory_are_not_new_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file is a file; name a new folder"):
        check_new_folder(tmp_path / "file")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"^\. is the current directory; name a new folder in it, such as ./model"):
        check_new_folder(Path())


def test_a_disk_that_fails_halfway_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    calls = iter(range(2))

    def refuse_the_second(descriptor: int) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(new_file.os, "fsync", refuse_the_second)
    with pytest.raises(StateError) as caught:
        write_new_folder(tmp_path / "folder", FILES)
    assert str(caught.value) == (
        f"cannot write the folder {tmp_path / 'folder'}: No space left on device; check the disk, or name another "
        "folder"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("target", ["nowhere", "folder"])
def test_a_link_that_leads_nowhere_is_not_a_new_folder(tmp_path: Path, target: str) -> None:
    """One that leads to itself neither."""
    (tmp_path / "folder").symlink_to(target)
    with pytest.raises(ConfigError, match=rf"folder is a link to {target}, which does not exist; name a new folder"):
        check_new_folder(tmp_path / "folder")
