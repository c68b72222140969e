"""The list of files: one canonical form, names that cannot leave their folder, pieces that cover every byte once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.protocol.wire import file_list
from p2p_diloco.protocol.wire.file_list import (
    FILE_PIECE_BYTES,
    MOST_FILES,
    MOST_LIST_BYTES,
    MOST_NAME_BYTES,
    FileList,
    ListedFile,
    parse_file_list,
)

PLAIN = st.text("abcXYZ09-_é", min_size=1, max_size=6)
NAMES = st.lists(st.lists(PLAIN, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6)


def listed(name: str, num_bytes: int = 1) -> ListedFile:
    count = -(-num_bytes // FILE_PIECE_BYTES)
    return ListedFile(
        name=name,
        num_bytes=num_bytes,
        pieces=tuple(sha256(name.encode("utf-8", "replace"), bytes([n])) for n in range(count)),
    )


def list_of(*names: str) -> FileList:
    return FileList(tuple(map(listed, names)))


@given(NAMES, st.integers(1, 3 * FILE_PIECE_BYTES))
def test_a_list_survives_encoding_and_every_cut_is_refused(names: list[str], num_bytes: int) -> None:
    try:
        files = FileList(tuple(listed(name, num_bytes) for name in sorted(set(names))))
    except FrameError:
        return  # two names differ only in case, or one is the folder of another
    encoded = files.encode()
    assert parse_file_list(encoded) == files
    assert files.digest() == sha256(encoded)
    for cut in (0, 1, len(encoded) // 2, len(encoded) - 1):
        with pytest.raises(FrameError):
            parse_file_list(encoded[:cut])
    with pytest.raises(FrameError, match="too long"):
        parse_file_list(encoded + b"x")


def test_the_pieces_of_a_list_cover_every_byte_once() -> None:
    sizes = (1, FILE_PIECE_BYTES, FILE_PIECE_BYTES + 1, 3 * FILE_PIECE_BYTES)
    files = FileList(tuple(listed(f"{index}", size) for index, size in enumerate(sizes)))
    assert (files.num_bytes, files.num_pieces) == (sum(sizes), 1 + 1 + 2 + 3)
    pieces = list(files.pieces())
    for index, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.file == index]
        assert own == [files.piece(number) for number in files.pieces_of(index)]
        assert [piece.offset for piece in own] == list(range(0, size, FILE_PIECE_BYTES))
        assert sum(piece.num_bytes for piece in own) == size
        assert tuple(piece.digest for piece in own) == files.files[index].pieces


def test_equal_texts_have_equal_digests_and_others_do_not() -> None:
    digests = {
        list_of("a", "b").digest(),
        list_of("a", "c").digest(),
        FileList((listed("a", 2), listed("b"))).digest(),
        FileList((ListedFile(name="a", num_bytes=1, pieces=(Digest(bytes(32)),)), listed("b"))).digest(),
    }
    assert len(digests) == 4
    assert list_of("a", "b").digest() == list_of("a", "b").digest()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../outside",
        "inside/../../outside",
        "a//b",
        "a/",
        "./a",
        ".hidden",
        "folder/.hidden",
        "a\\b",
        "line\nbreak",
        "bell\x07",
        "right\u202eleft",
        "half\ud800",
        "dot.",
        "space ",
        "x" * (MOST_NAME_BYTES + 1),
    ],
)
def test_a_name_that_could_do_harm_is_refused(name: str) -> None:
    with pytest.raises(FrameError, match="cannot be shared; expected a relative path"):
        list_of(name)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "a text of 0 files"),
        (tuple(f"{index:05}" for index in range(MOST_FILES + 1)), "a text of 65537 files"),
        (("b", "a"), "not in the order"),
        (("a", "a"), "not in the order"),
        (("Readme", "readme"), "the same name on some disks"),
        (("caf\u00e9", "cafe\u0301"), "the same name on some disks|not in the order"),
        (("A", "a/b"), "is a file, and also the folder of"),
        (("a", "a/b/c"), "is a file, and also the folder of"),
    ],
)
def test_names_that_collide_are_refused(names: tuple[str, ...], why: str) -> None:
    with pytest.raises(FrameError, match=why):
        list_of(*names)


@pytest.mark.parametrize("num_bytes", [0, FILE_PIECE_BYTES + 1])
def test_a_length_that_its_pieces_do_not_have_is_refused(num_bytes: int) -> None:
    with pytest.raises(FrameError, match=f"file a of {num_bytes} bytes is listed with 1 pieces"):
        FileList((ListedFile(name="a", num_bytes=num_bytes, pieces=(Digest(bytes(32)),)),))


def test_a_text_of_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_list, "MOST_PIECES", 2)
    assert FileList((listed("a", 2 * FILE_PIECE_BYTES),)).num_pieces == 2
    with pytest.raises(FrameError, match="in 3 pieces; expected at most 2"):
        FileList((listed("a", 2 * FILE_PIECE_BYTES), listed("b")))


def test_bytes_that_are_no_list_are_refused() -> None:
    for encoded in (b"", b"p2p-diloco files 2\n", bytes(MOST_LIST_BYTES + 1)):
        with pytest.raises(FrameError, match="are not a list of files"):
            parse_file_list(encoded)
    encoded = list_of("a").encode()
    at = encoded.index(b"\x01\x00\x00\x00a") + 4
    with pytest.raises(FrameError, match="is not UTF-8"):
        parse_file_list(encoded[:at] + b"\xff" + encoded[at + 1 :])
