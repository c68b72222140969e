"""Exports appear whole or not at all, the newest are kept, and nothing that others wrote is removed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from p2p_diloco.config import new_file
from p2p_diloco.errors import StateError
from p2p_diloco.storage.export_folder import WORD_FILE, ExportFolder, due_cycle, export_name, surplus

FILES = {"model.safetensors": b"weights", "README.md": b"card"}


@pytest.mark.parametrize(
    ("num_cycles", "every", "newest", "due"),
    [
        (0, 10, 0, None),
        (9, 10, 0, None),
        (10, 10, 0, 10),
        (19, 10, 0, 10),
        (19, 10, 10, None),
        (20, 10, 10, 20),
        (57, 10, 10, 50),
        (5, 1, 4, 5),
        (-1, 1, 0, None),
        (12, 5, 20, None),
        (21, 7, 20, 21),
    ],
)
def test_the_latest_multiple_is_due_unless_it_was_exported(
    num_cycles: int, every: int, newest: int, due: int | None
) -> None:
    assert due_cycle(num_cycles, every, newest) == due


@pytest.mark.parametrize(
    ("cycles", "keep", "removed"),
    [([], 2, []), ([10], 1, []), ([10, 20], 2, []), ([10, 20, 30], 2, [10]), ([30, 10, 20, 40], 1, [10, 20, 30])],
)
def test_the_oldest_exports_are_surplus(cycles: list[int], keep: int, removed: list[int]) -> None:
    assert surplus(cycles, keep) == removed


class Place:
    """A folder of exports, and starts of the archivist that writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "exports"
        self.listing = path / "exports.json"

    def start(self, *, keep: int = 2, owner: str = "archie") -> ExportFolder:
        folder = ExportFolder(self.path, self.listing, keep=keep, owner=owner)
        self.sentences = folder.tidy()
        return folder

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_newest_are_kept_and_a_restart_knows_them(place: Place) -> None:
    folder = place.start()
    assert (folder.newest, folder.state) == (0, "")
    for cycle in (9, 10, 100):
        assert folder.write(cycle, FILES, f"state {cycle}") == ()
    assert place.names() == [export_name(10), export_name(100)]
    written = {path.name: path.read_bytes() for path in folder.path(100).iterdir()}
    assert {name: content for name, content in written.items() if name != WORD_FILE} == FILES
    again = place.start()
    assert (again.newest, again.state) == (100, "state 100")
    assert place.names() == [export_name(10), export_name(100)]
    place.start(keep=1)
    assert place.names() == [export_name(100)]


def test_an_export_that_was_moved_away_is_not_written_again(place: Place) -> None:
    folder = place.start()
    folder.write(10, FILES, "state")
    folder.path(10).rename(place.path / "published")
    assert place.start().newest == 10


def die(*_: Any, **__: Any) -> NoReturn:
    raise SystemExit("killed")


def test_what_a_crash_leaves_is_removed_at_the_next_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.start().write(10, FILES, "state")
    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", die)
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            place.start().write(20, FILES, "next")
    assert place.names() == [".cycle-000000020.archie", export_name(10)], "no half export under its name"
    again = place.start()
    assert place.names() == [export_name(10)]
    assert again.newest == 10, "it is written again"
    again.write(20, FILES, "next")
    assert place.names() == [export_name(10), export_name(20)]


def test_a_crash_right_after_an_export_does_not_repeat_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def rename_and_die(self: Path, to: Path) -> NoReturn:
        rename(self, to)
        raise SystemExit("killed")

    monkeypatch.setattr(Path, "rename", rename_and_die)
    with pytest.raises(SystemExit):
        place.start().write(10, FILES, "state")
    monkeypatch.undo()
    assert place.names() == [export_name(10)]
    folder = place.start()
    assert folder.newest == 10
    for cycle in (20, 30):
        folder.write(cycle, FILES, "state")
    assert place.names() == [export_name(20), export_name(30)], "it is one of this peer's exports"


def test_a_folder_that_another_archivist_wrote_meanwhile_is_left_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", die)
        with pytest.raises(SystemExit):
            place.start(keep=1).write(2, FILES, "state")
    other = ExportFolder(place.path, tmp_path / "others.json", keep=2, owner="bert")
    other.write(2, FILES, "state")
    again = place.start(keep=1)
    again.write(4, FILES, "later")
    assert place.names() == [export_name(2), export_name(4)]
    assert other.newest == 2


def test_a_crash_while_an_old_export_is_removed_leaves_no_part_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.start(keep=1)
    folder.write(10, FILES, "state")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, ignore_errors=False: None if ignore_errors else die())
        with pytest.raises(SystemExit):
            folder.write(20, FILES, "next")
    assert place.names() == [".cycle-000000010.archie", export_name(20)]
    place.start(keep=1)
    assert place.names() == [export_name(20)]


def test_nothing_that_others_wrote_is_removed(place: Place) -> None:
    folder = place.start(keep=1)
    for name in ("cycle-000000001", ".cycle-000000001.bert"):
        (place.path / name).mkdir(parents=True)
    folder.write(10, FILES, "state")
    (folder.path(10) / "notes.txt").write_text("mine")
    sentences = folder.write(20, FILES, "next")
    assert sentences == (f"{folder.path(10)} stays, because notes.txt in it is not part of the export",)
    assert place.names() == [".cycle-000000001.bert", "cycle-000000001", export_name(10), export_name(20)]
    assert folder.write(30, FILES, "third") == (), "it is reported once"
    assert sorted(os.listdir(folder.path(10))) == [WORD_FILE, "README.md", "model.safetensors", "notes.txt"]


def test_an_export_never_replaces_a_folder(place: Place) -> None:
    folder = place.start()
    folder.path(10).mkdir(parents=True)
    (folder.path(10) / "README.md").write_text("mine")
    with pytest.raises(StateError, match="is not empty, and nothing in it is overwritten"):
        folder.write(10, FILES, "state")
    assert (folder.path(10) / "README.md").read_text() == "mine"
    assert place.start(keep=1).newest == 0
    assert place.names() == [export_name(10)], "it does not count as this peer's"


def test_a_full_disk_leaves_the_older_exports(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.start(keep=1)
    folder.write(10, FILES, "state")

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(new_file.os, "fsync", refuse)
        with pytest.raises(StateError, match="No space left on device"):
            folder.write(20, FILES, "next")
    assert place.names() == [export_name(10)]
    assert (folder.newest, folder.state) == (10, "state")
    folder.write(30, FILES, "third")
    assert place.names() == [export_name(30)]


def test_a_full_disk_does_not_keep_the_peer_from_starting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.start().write(10, FILES, "state")

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert place.start().newest == 10


def test_a_broken_listing_is_refused_with_a_remedy(place: Place) -> None:
    place.listing.write_text('{"newest": 3}')
    with pytest.raises(StateError, match=r"exports.json is broken \(KeyError\); move it away: the exports that"):
        place.start()


def test_an_export_that_cannot_be_removed_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.start(keep=1)
    folder.write(10, FILES, "state")

    def refuse(*_: object, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (sentence,) = folder.write(20, FILES, "next")
    left = place.path / ".cycle-000000010.archie"
    assert sentence == f"cannot remove {left}: Permission denied; remove it by hand"
    assert left.is_dir()
