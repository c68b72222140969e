"""Copies of a shared text on a disk: fetched pieces survive a kill at any byte, and no wrong byte is used or sent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import sha256
from p2p_diloco.protocol.wire.file_list import FILE_PIECE_BYTES, FileList
from p2p_diloco.storage import text_copy
from p2p_diloco.storage.text_copy import (
    OwnText,
    TextStore,
    available_ranges,
    list_own_text,
    open_own_text,
    root_of,
    text_folder,
)

LONG = FILE_PIECE_BYTES + 1000


def write_text(folder: Path) -> Path:
    """Write a text of two files, one of two pieces."""
    root = folder / "own"
    (root / "part").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"first file\n" * 100)
    (root / "part" / "b.txt").write_bytes(bytes(index * 7 % 251 for index in range(LONG)))
    (root / ".hidden").write_bytes(b"not of the text")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def own(root: Path) -> OwnText:
    return list_own_text(str(root))


def list_in(copy: OwnText | TextStore) -> FileList:
    assert copy.listed is not None
    return copy.listed


def content_of(own: OwnText, piece: int) -> bytes:
    digest = list_in(own).piece(piece).digest
    total, content = own.read(digest, 0, FILE_PIECE_BYTES)
    assert total == len(content)
    return content


def store_in(folder: Path, own: OwnText, *pieces: int) -> TextStore:
    """Return a store with the list and some pieces."""
    store = TextStore(folder, own.digest)
    if store.listed is None:
        assert store.adopt(list_in(own).encode())
    for piece in pieces:
        assert store.keep(piece, content_of(own, piece))
    return store


def checked(store: TextStore) -> int:
    """Check what an earlier start has written; return what is held."""
    for piece in range(list_in(store).num_pieces):
        if store.unchecked >> piece & 1:
            store.check(piece)
    return store.held


def test_a_text_is_listed_by_relative_names_and_served_from_where_it_lies(root: Path, own: OwnText) -> None:
    files = list_in(own).files
    assert [(file.name, file.num_bytes) for file in files] == [("a.txt", 1100), ("part/b.txt", LONG)]
    assert files[0].pieces == (sha256((root / "a.txt").read_bytes()),), "what sha256sum prints"
    assert own.held == 0b111
    assert own.read(own.digest, 3, 10) == (len(list_in(own).encode()), list_in(own).encode()[3:13])
    assert own.read(files[0].pieces[0], 1095, 100) == (1100, b"file\n")
    assert own.read(files[0].pieces[0], 1100, 100) == (0, b""), "nothing lies behind the end"
    assert own.read(sha256(b"unknown"), 0, 100) == (0, b"")


def test_a_text_that_changed_on_the_disk_is_not_sent(root: Path, own: OwnText) -> None:
    (root / "a.txt").write_bytes(b"First file\n" * 100)
    assert own.read(list_in(own).piece(0).digest, 0, 100) == (0, b"")
    (root / "part" / "b.txt").unlink()
    assert own.read(list_in(own).piece(1).digest, 0, 100) == (0, b"")
    assert own.held == 0b100, "noticed when it is used"


def test_fetched_pieces_become_the_same_files(tmp_path: Path, root: Path, own: OwnText) -> None:
    store = store_in(tmp_path / "store", own, 2, 0, 1)
    for name in ("a.txt", "part/b.txt"):
        assert (store.root / name).read_bytes() == (root / name).read_bytes()
    assert store.held == 0b111
    assert content_of(own, 1) == store.read(list_in(own).piece(1).digest, 0, FILE_PIECE_BYTES)[1]


def test_wrong_bytes_are_neither_stored_nor_served(tmp_path: Path, own: OwnText) -> None:
    store = TextStore(tmp_path / "store", own.digest)
    assert store.read(own.digest, 0, 100) == (0, b"")
    assert not store.adopt(list_in(own).encode()[:-1])
    assert not (tmp_path / "store").exists()
    store = store_in(tmp_path / "store", own)
    flipped = bytearray(content_of(own, 0))
    flipped[5] ^= 1
    assert not store.keep(0, flipped)
    assert store.held == 0
    assert store.read(list_in(own).piece(0).digest, 0, 100) == (0, b"")


def test_a_restart_counts_only_what_is_really_there(tmp_path: Path, own: OwnText) -> None:
    folder = tmp_path / "store"
    store_in(folder, own, 0, 2)
    again = TextStore(folder, own.digest)
    assert (again.held, again.unchecked) == (0, 0b101)
    assert checked(again) == 0b101
    with (again.root / "a.txt").open("r+b") as file:
        file.write(b"F")
    assert checked(TextStore(folder, own.digest)) == 0b100, "a lost write or a flipped bit"
    (folder / "pieces").write_bytes(b"\1")
    assert checked(TextStore(folder, own.digest)) == 0, "flags of another length mean nothing"
    (folder / "list").write_bytes(b"torn")
    fresh = TextStore(folder, own.digest)
    assert fresh.listed is None
    assert fresh.adopt(list_in(own).encode())


KILLED = """
import os, signal, sys
from pathlib import Path
from p2p_diloco.storage import text_copy
from p2p_diloco.storage.text_copy import TextStore, list_own_text

own = list_own_text(sys.argv[1])
left = int(sys.argv[3])
real = os.pwritev

def pwritev(descriptor, views, offset):
    global left
    [view] = views
    written = real(descriptor, [view[:left]], offset)
    left -= written
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return written

os.pwritev = pwritev
store = TextStore(Path(sys.argv[2]), own.digest)
store.adopt(own.listed.encode())
for piece in range(own.listed.num_pieces):
    store.keep(piece, own.read(own.listed.piece(piece).digest, 0, 1 << 20)[1])
"""


@pytest.mark.parametrize(
    ("written", "held"),
    [
        (1, 0),
        (1099, 0),
        (1100, 0),
        (1101, 0b1),
        (1102, 0b1),
        (1101 + 500_000, 0b1),
        (1101 + FILE_PIECE_BYTES + 1, 0b11),
    ],
)
def test_a_kill_after_any_byte_loses_at_most_the_piece_being_written(
    tmp_path: Path, root: Path, own: OwnText, written: int, held: int
) -> None:
    folder = tmp_path / "store"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(root), str(folder), str(written)], check=False)
    assert ended.returncode == -signal.SIGKILL
    store = TextStore(folder, own.digest)
    assert checked(store) == held
    for piece in range(3):
        if not store.held >> piece & 1:
            assert store.keep(piece, content_of(own, piece))
    assert (store.root / "part" / "b.txt").read_bytes() == (root / "part" / "b.txt").read_bytes()


def test_a_disk_that_is_too_small_is_refused_with_a_sentence(
    tmp_path: Path, own: OwnText, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = TextStore(tmp_path / "store", own.digest, most_bytes=LONG)
    with pytest.raises(StateError, match=r"the run's text needs 1\.1 MB in .*, where 1\.0 MB may be used; free some"):
        small.adopt(list_in(own).encode())
    assert not (tmp_path / "store").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(text_copy.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StateError, match=r"where 0 B are free, less 268\.4 MB for checkpoints"):
        TextStore(tmp_path / "store", own.digest).adopt(list_in(own).encode())


def test_a_text_that_does_not_fit_makes_room_for_the_files_that_are_wanted(tmp_path: Path) -> None:
    root = tmp_path / "shards"
    root.mkdir()
    for number in range(4):
        (root / f"{number}.bin").write_bytes(bytes([number + 1]) * 1000)
    own = list_own_text(str(root))
    store = TextStore(tmp_path / "store", own.digest, most_bytes=2500, needs_all=False)
    assert store.adopt(list_in(own).encode())
    assert not store.has_room_for_all
    store.wanted = 0b0011
    for piece in (0, 1):
        assert store.keep(piece, content_of(own, piece))
    with pytest.raises(StateError, match=r"reads at a time need more than the 2\.5 kB that .* has room for"):
        store.keep(2, content_of(own, 2))
    store.wanted = 0b0110
    assert store.keep(2, content_of(own, 2))
    assert store.held == 0b0110
    assert (store.root / "0.bin").read_bytes() == bytes(1000), "its space is free, its length is kept"
    assert store.read(list_in(own).piece(0).digest, 0, 10) == (0, b"")
    again = TextStore(tmp_path / "store", own.digest, most_bytes=2500, needs_all=False)
    assert checked(again) == 0b0110
    with pytest.raises(StateError, match=r"the run's text needs 4\.0 kB"):
        TextStore(tmp_path / "store", own.digest, most_bytes=2500)


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path, own: OwnText, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"cannot write the run's text to .*; free some space"):
        TextStore(tmp_path / "file" / "store", own.digest).adopt(list_in(own).encode())
    store = store_in(tmp_path / "store", own)
    shutil.rmtree(store.root)
    with pytest.raises(StateError, match=r"cannot write the run's text to .*: No such file"):
        store.keep(0, content_of(own, 0))
    assert store.held == 0


def test_a_list_that_the_organiser_should_not_have_signed_is_refused(tmp_path: Path) -> None:
    encoded = b"p2p-diloco files 1\n" + bytes(4)
    with pytest.raises(ConfigError, match=r"the organiser's list of files cannot be used \(a text of 0 files"):
        TextStore(tmp_path / "store", sha256(encoded)).adopt(encoded)


def test_an_own_copy_is_read_once_and_then_recognised(
    tmp_path: Path, root: Path, own: OwnText, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    assert open_own_text(str(root), own.digest, state).listed == own.listed

    def refuse(path: str) -> OwnText:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(text_copy, "list_own_text", refuse)
    again = open_own_text(str(root), own.digest, state)
    assert (again.listed, again.held) == (own.listed, 0b111)
    (root / "a.txt").write_bytes(b"shorter")
    with pytest.raises(AssertionError, match="is read again"):
        open_own_text(str(root), own.digest, state)


def test_another_text_than_the_runs_is_refused(tmp_path: Path, root: Path, own: OwnText) -> None:
    (root / "c.txt").write_bytes(b"one more")
    with pytest.raises(ConfigError, match=r"is not the run's: its list of files has the digest .*leave out --data"):
        open_own_text(str(root), own.digest, tmp_path / "state")
    assert not text_folder(tmp_path / "state", own.digest).exists()


def test_names_that_cannot_be_shared_are_the_organisers_error(root: Path) -> None:
    (root / "a\nb").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"the text .* cannot be shared: file name 'a\?b'"):
        list_own_text(str(root))


@pytest.mark.parametrize("pattern", ["", "a.txt", "*.txt", "**/*.txt", "part/b.txt"])
def test_a_file_a_folder_and_a_glob_have_names_relative_to_their_folder(root: Path, pattern: str) -> None:
    path = str(root / pattern) if pattern else str(root)
    own = list_own_text(path)
    for file in list_in(own).files:
        assert (root_of(path) / file.name).stat().st_size == file.num_bytes


def test_held_pieces_are_stretches_of_the_text(own: OwnText) -> None:
    listed = list_in(own)
    assert available_ranges(listed, 0) == []
    assert available_ranges(listed, 0b111) == [(0, listed.num_bytes)]
    assert available_ranges(listed, 0b101) == [(0, 1100), (1100 + FILE_PIECE_BYTES, listed.num_bytes)]
    assert available_ranges(listed, 0b010) == [(1100, 1100 + FILE_PIECE_BYTES)]


def test_a_file_that_cannot_be_read_is_named(root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (root / "a.txt").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied; make it readable"):
        list_own_text(str(root))
