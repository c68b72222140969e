"""The list of the files of a text: names, sizes and the SHA-256 of every piece of each file.

The manifest names only the digest of this list, which may be long. Peers fetch the list and then the pieces, and check
each against its digest, so it does not matter who sends them. A file of at most one piece has the digest that
`sha256sum` prints for it.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from p2p_diloco.errors import FrameError, clean_text, has_unseen
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.protocol.wire.frames import DIGEST, U64, FrameReader, Layout, blob, many, record, take_fields, to_bytes

FILE_PIECE_BYTES = 1 << 20
"""Length of a piece; the last one of a file is shorter. A flipped byte costs one piece."""
MOST_FILES = 1 << 16
MOST_PIECES = 1 << 19
"""Maximum number of pieces of a text: half a terabyte."""
MOST_NAME_BYTES = 512
MOST_LIST_BYTES = MOST_PIECES * 32 + (1 << 23)

_DOMAIN = b"p2p-diloco files 1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """One file: its relative POSIX name, its length, and the digests of its pieces in order."""

    name: str
    num_bytes: int
    pieces: tuple[Digest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """A piece of a text: the index of its file, where it begins in the file, its length and its digest."""

    file: int
    offset: int
    num_bytes: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class FileList:
    """The files of a text, ordered by name. Its pieces are numbered through all files, in order.

    Raises:
        FrameError: a name, a length or the order breaks a rule; see `check_names`.
    """

    files: tuple[ListedFile, ...]
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_names([file.name for file in self.files])
        for file in self.files:
            if file.num_bytes < 1 or len(file.pieces) != num_pieces(file.num_bytes):
                raise FrameError(
                    f"file {clean_text(file.name)} of {file.num_bytes} bytes is listed with {len(file.pieces)} pieces; "
                    f"expected a file that is not empty, in pieces of {FILE_PIECE_BYTES} bytes"
                )
        firsts = tuple(accumulate((len(file.pieces) for file in self.files), initial=0))
        if firsts[-1] > MOST_PIECES:
            raise FrameError(
                f"the text has {self.num_bytes} bytes in {firsts[-1]} pieces; expected at most {MOST_PIECES} pieces of "
                f"{FILE_PIECE_BYTES} bytes"
            )
        object.__setattr__(self, "_firsts", firsts)

    @property
    def num_bytes(self) -> int:
        """Length of all files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_pieces(self) -> int:
        """Number of pieces of all files."""
        return self._firsts[-1]

    def piece(self, number: int) -> FilePiece:
        """Return piece `number`."""
        index = bisect_right(self._firsts, number) - 1
        file, within = self.files[index], number - self._firsts[index]
        offset = within * FILE_PIECE_BYTES
        length = min(FILE_PIECE_BYTES, file.num_bytes - offset)
        return FilePiece(file=index, offset=offset, num_bytes=length, digest=file.pieces[within])

    def pieces(self) -> Iterator[FilePiece]:
        """Yield all pieces in order."""
        return map(self.piece, range(self.num_pieces))

    def pieces_of(self, index: int) -> range:
        """Return the numbers of the pieces of file `index`."""
        return range(self._firsts[index], self._firsts[index + 1])

    def encode(self) -> bytes:
        """Return the canonical bytes, whose digest the manifest names."""
        return _DOMAIN + to_bytes(_Rows(tuple(_Row(file.name.encode(), file) for file in self.files)), _LIST_LAYOUT)

    def digest(self) -> Digest:
        """Return the SHA-256 of the canonical bytes."""
        return sha256(self.encode())


def num_pieces(num_bytes: int) -> int:
    """Return the number of pieces of a file."""
    return -(-num_bytes // FILE_PIECE_BYTES)


def parse_file_list(encoded: bytes | memoryview) -> FileList:
    """Read the output of `FileList.encode`.

    Raises:
        FrameError: it is too long, cut off, not in canonical form, or a name or a length breaks a rule.
    """
    if len(encoded) > MOST_LIST_BYTES or bytes(encoded[: len(_DOMAIN)]) != _DOMAIN:
        raise FrameError(f"{len(encoded)} bytes are not a list of files; was it made by another version?")
    reader = FrameReader(encoded[len(_DOMAIN) :])
    rows = take_fields(reader, _LIST_LAYOUT)["rows"]
    reader.expect_end()
    return FileList(tuple(ListedFile(name=_decoded(row["name"]), **row["rest"]) for row in rows))


def check_names(names: Sequence[str]) -> None:
    """Refuse names that would leave the folder of the text, collide on some disk, or trick a reader.

    Raises:
        FrameError: there are no files or too many, a name is not a plain relative path, names are not in order, or two
            names differ only in case or name a file and a folder.
    """
    if not 0 < len(names) <= MOST_FILES:
        raise FrameError(f"a text of {len(names)} files; expected 1 to {MOST_FILES}")
    for name in names:
        if not _is_plain(name):
            raise FrameError(
                f"file name {clean_text(name, 100)!r} cannot be shared; expected a relative path of at most "
                f"{MOST_NAME_BYTES} bytes, without '..', backslashes, hidden parts and control characters; rename it"
            )
    if any(before >= name for before, name in pairwise(names)):
        raise FrameError("the files of a list are not in the order of their names")
    folded: dict[str, str] = {}
    for name in names:
        known = folded.setdefault(_folded(name), name)
        if known != name:
            raise FrameError(f"files {known} and {name} have the same name on some disks; rename one of them")
    for name in names:
        for place in _folders_of(_folded(name)):
            if place in folded:
                raise FrameError(f"{folded[place]} is a file, and also the folder of {name}; rename one of them")


def _is_plain(name: str) -> bool:
    if not name or has_unseen(name) or "\\" in name or len(name.encode("utf-8", "replace")) > MOST_NAME_BYTES:
        return False
    return all(part and not part.startswith(".") and not part.endswith((" ", ".")) for part in name.split("/"))


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _folders_of(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _decoded(name: bytes) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        raise FrameError(f"file name {clean_text(name.decode('utf-8', 'replace'))!r} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class _Row:
    name: bytes
    rest: ListedFile


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: tuple[_Row, ...]


_REST_LAYOUT: Layout = (("num_bytes", U64), ("pieces", many(DIGEST, MOST_PIECES)))
_ROW_LAYOUT: Layout = (("name", blob(MOST_NAME_BYTES)), ("rest", record(dict, _REST_LAYOUT)))
_LIST_LAYOUT: Layout = (("rows", many(record(dict, _ROW_LAYOUT), MOST_FILES)),)
