"""A peer's copy of the text that its run shares: the user's own files, or pieces fetched from other peers.

Fetched pieces are in `<state>/texts/<digest>/`: `list` is the list of files, `text/` holds the files, and `pieces` has
one byte for each piece, 1 once it is in its file. A kill at any moment loses at most the piece that was being written.
What a start finds there counts only once it has been read and its digest compared, because the disk may have lost it.
The folder stays when the peer leaves, so that a restart fetches nothing twice; delete it to free the space.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from glob import has_magic
from pathlib import Path

from p2p_diloco.errors import ConfigError, FrameError, StateError
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.protocol.wire.file_list import (
    FILE_PIECE_BYTES,
    FileList,
    ListedFile,
    check_names,
    num_pieces,
    parse_file_list,
)
from p2p_diloco.storage.corpus_files import list_corpus_files
from p2p_diloco.storage.whole_file import replace_file, write_at
from p2p_diloco.wording import format_bytes

TEXTS = "texts"
LIST_FILE, PIECES_FILE, TEXT_FOLDER = "list", "pieces", "text"
KEPT_FREE_BYTES = 256 << 20
"""Space that a fetched text leaves on the disk for checkpoints, if nothing else is asked for."""
_CACHED_PIECES = 8
_HERE = b"\1"


def text_folder(state_directory: Path, digest: Digest) -> Path:
    """Return the folder of a fetched text in a state directory."""
    return state_directory / TEXTS / digest.hex()[:16]


class TextCopy:
    """The files of a text of which some pieces are held; see `TextCopy` in node/ports for its methods.

    Methods that use the disk must be called from one thread; the attributes may be read from any.

    Attributes:
        is_fetched: whether missing pieces are fetched from other peers.
        has_room_for_all: whether the whole text is fetched, and not only the pieces that are wanted.
    """

    is_fetched = False
    has_room_for_all = True

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self.listed: FileList | None = None
        self.held = self.unchecked = self.wanted = 0
        self._held_bytes = 0
        self._encoded = b""
        self._paths: tuple[Path, ...] = ()
        self._numbers: dict[Digest, int] = {}
        self._recent: OrderedDict[Digest, bytes] = OrderedDict()

    def want(self, pieces: int) -> None:
        """Fetch these pieces, a bit each, before all others."""
        self.wanted = pieces

    def read(self, digest: Digest, offset: int, most_bytes: int) -> tuple[int, bytes]:
        """Return the length of the content with this digest, and bytes of it; (0, b"") if it is not here."""
        if self.listed is None:
            return 0, b""
        content = self._encoded if digest == self.digest else self._piece(digest)
        block = content[offset : offset + most_bytes]
        return (len(content), block) if block else (0, b"")

    def _piece(self, digest: Digest) -> bytes:
        """Return a piece whose bytes are right; the last few stay in memory, because a piece is sent in blocks."""
        number = self._numbers.get(digest)
        if number is None or not self.held >> number & 1:
            return b""
        if digest not in self._recent:
            content = self._read_piece(number)
            if sha256(content) != digest:
                self._drop(number)
                return b""
            self._recent[digest] = content
            if len(self._recent) > _CACHED_PIECES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(digest)
        return self._recent[digest]

    def _read_piece(self, number: int) -> bytes:
        """Return the bytes where a piece belongs; whatever they are, or none if they cannot be read."""
        assert self.listed is not None, "known before its pieces"
        piece = self.listed.piece(number)
        with contextlib.suppress(OSError), self._paths[piece.file].open("rb") as file:
            file.seek(piece.offset)
            return file.read(piece.num_bytes)
        return b""

    def _set_list(self, listed: FileList, encoded: bytes, paths: Sequence[Path]) -> None:
        self._encoded, self._paths = encoded, tuple(paths)
        self.listed = listed

    def _hold(self, number: int) -> None:
        assert self.listed is not None, "known before its pieces"
        piece = self.listed.piece(number)
        self._numbers[piece.digest] = number  # of pieces with equal bytes, one that is here
        self._held_bytes += 0 if self.held >> number & 1 else piece.num_bytes
        self.held |= 1 << number

    def _drop(self, number: int) -> None:
        assert self.listed is not None, "known before its pieces"
        self._held_bytes -= self.listed.piece(number).num_bytes if self.held >> number & 1 else 0
        self.held &= ~(1 << number)


class OwnText(TextCopy):
    """The user's own copy, which is only read. A piece is checked before it is sent."""

    def __init__(self, listed: FileList, paths: Sequence[Path]) -> None:
        encoded = listed.encode()
        super().__init__(sha256(encoded))
        self._set_list(listed, encoded, paths)
        for number in range(listed.num_pieces):
            self._hold(number)

    def adopt(self, encoded: bytes | bytearray) -> bool:
        """Refuse: this copy has its list."""
        raise AssertionError("an own copy is never fetched")

    def check(self, piece: int) -> None:
        """Refuse: nothing is left to check."""
        raise AssertionError("an own copy is checked when it is sent")

    def keep(self, piece: int, content: bytes | bytearray) -> bool:
        """Refuse: this copy is complete."""
        raise AssertionError("an own copy is never fetched")


class TextStore(TextCopy):
    """A text that is fetched into a folder.

    Args:
        folder: see `text_folder`; created once the list is here.
        digest: digest of the list, from the manifest.
        most_bytes: maximum space that the text may take; None: what is free, less `KEPT_FREE_BYTES`.
        needs_all: whether a text that does not fit is refused. Otherwise only the files that are wanted are fetched,
            and others make room for them.
    """

    is_fetched = True

    def __init__(self, folder: Path, digest: Digest, *, most_bytes: int | None = None, needs_all: bool = True) -> None:
        super().__init__(digest)
        self._needs_all = needs_all
        self._most_here = 0
        self.root = folder / TEXT_FOLDER
        """Folder with the files, each of its full length from the beginning."""
        self._folder = folder
        self._most_bytes = most_bytes
        encoded = self._read_file(LIST_FILE)
        if sha256(encoded) == digest:
            self._open(encoded)

    def adopt(self, encoded: bytes | bytearray) -> bool:
        """Store the list and make room for the files; return False if it has another digest.

        Raises:
            ConfigError: the organiser signed a list that breaks a rule.
            StateError: the disk is too small, or cannot be written.
        """
        if sha256(memoryview(encoded)) != self.digest:
            return False
        listed = _parsed(bytes(encoded))
        self._check_space(listed.num_bytes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / LIST_FILE, bytes(encoded))
        except OSError as error:
            raise self._disk_error(error) from None
        self._open(bytes(encoded))
        return True

    def _open(self, encoded: bytes) -> None:
        """Take up the files and pieces that are in the folder."""
        listed = _parsed(encoded)
        paths = [self.root / file.name for file in listed.files]
        flags = self._read_file(PIECES_FILE)
        try:
            if len(flags) != listed.num_pieces:
                flags = bytes(listed.num_pieces)
                replace_file(self._folder / PIECES_FILE, flags)
            for path, file in zip(paths, listed.files, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as opened:
                    opened.truncate(file.num_bytes)  # a hole where nothing is written yet
        except OSError as error:
            raise self._disk_error(error) from None
        self.unchecked = sum(1 << number for number, flag in enumerate(flags) if flag == _HERE[0])
        self._check_space(listed.num_bytes, self.unchecked.bit_count() * FILE_PIECE_BYTES)
        self._set_list(listed, encoded, paths)

    def check(self, piece: int) -> None:
        """Read a piece of an earlier start, which is then held or missing."""
        assert self.listed is not None, "known before its pieces"
        if sha256(self._read_piece(piece)) == self.listed.piece(piece).digest:
            self._hold(piece)
        self.unchecked &= ~(1 << piece)

    def keep(self, piece: int, content: bytes | bytearray) -> bool:
        """Store a piece; return False if it has another digest.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        assert self.listed is not None, "known before its pieces"
        place = self.listed.piece(piece)
        if sha256(memoryview(content)) != place.digest:
            return False
        try:
            if not self.has_room_for_all:
                self._make_room(len(content))
            write_at(self._paths[place.file], place.offset, [content])
            write_at(self._folder / PIECES_FILE, piece, [_HERE])
        except OSError as error:
            raise self._disk_error(error) from None
        self._hold(piece)
        return True

    def _read_file(self, name: str) -> bytes:
        """Return the bytes of a file; none if it does not exist."""
        path = self._folder / name
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}; check the disk") from None

    def _check_space(self, text_bytes: int, here_bytes: int = 0) -> None:
        """Compare the space with what the text needs, of which `here_bytes` are on the disk already."""
        place = next(place for place in (self._folder, *self._folder.parents) if place.exists())
        free = shutil.disk_usage(place).free - KEPT_FREE_BYTES + here_bytes
        most = free if self._most_bytes is None else min(self._most_bytes, free)
        self.has_room_for_all, self._most_here = text_bytes <= most, most
        if not self.has_room_for_all and self._needs_all:
            limit = "may be used" if most < free else f"are free, less {format_bytes(KEPT_FREE_BYTES)} for checkpoints"
            raise StateError(
                f"the run's text needs {format_bytes(text_bytes)} in {self._folder}, where "
                f"{format_bytes(max(most, 0))} {limit}; free some space, choose another place with --state-directory, "
                "or name your own copy of the text with --data PATH"
            )

    def _make_room(self, num_bytes: int) -> None:
        """Empty files of which nothing is wanted, until there is room for more bytes."""
        assert self.listed is not None, "known before its pieces"
        for index in range(len(self.listed.files)):
            if self._held_bytes + num_bytes <= self._most_here:
                return
            numbers = self.listed.pieces_of(index)
            bits = (1 << numbers.stop) - (1 << numbers.start)
            if self.held & bits and not self.wanted & bits:
                for number in numbers:
                    self._drop(number)
                write_at(self._folder / PIECES_FILE, numbers.start, [bytes(len(numbers))])
                with self._paths[index].open("r+b") as file:
                    file.truncate(0)
                    file.truncate(self.listed.files[index].num_bytes)
        if self._held_bytes + num_bytes > self._most_here:
            raise StateError(
                f"the files of the run's text that training reads at a time need more than the "
                f"{format_bytes(max(self._most_here, 0))} that {self._folder} has room for; free some space, or choose "
                "another place with --state-directory"
            )

    def _disk_error(self, error: OSError) -> StateError:
        return StateError(
            f"cannot write the run's text to {self._folder}: {error.strerror}; free some space, or choose another "
            "place with --state-directory"
        )


def _parsed(encoded: bytes) -> FileList:
    try:
        return parse_file_list(encoded)
    except FrameError as error:
        raise ConfigError(
            f"the organiser's list of files cannot be used ({error}); ask the organiser for a new run"
        ) from None


# -- the user's own files


def list_own_text(path: str) -> OwnText:
    """Read all files that `path` names (a file, a folder or a glob), and make their list.

    Raises:
        ConfigError: there are none, one cannot be read, or a name cannot be shared.
    """
    root, paths = root_of(path), list_corpus_files(path)
    named = sorted((file.relative_to(root).as_posix(), file) for file in paths)
    try:
        check_names([name for name, _ in named])
        files = []
        for name, file in named:
            files.append(_listed(name, file))
        return OwnText(FileList(tuple(files)), [file for _, file in named])
    except FrameError as error:
        raise ConfigError(f"the text {path} cannot be shared: {error}") from None
    except OSError as error:
        raise ConfigError(f"the text {path} cannot be read: {error.strerror}; make it readable") from None


def open_own_text(path: str, digest: Digest, state_directory: Path) -> OwnText:
    """Return the user's own copy of a run's text; its list is kept, so that only the first start reads all of it.

    Raises:
        ConfigError: it is not the run's text.
        StateError: the list cannot be kept.
    """
    folder = text_folder(state_directory, digest)
    kept = _kept_list(folder / LIST_FILE, digest)
    root, paths = root_of(path), list_corpus_files(path)
    found = sorted((file.relative_to(root).as_posix(), file.stat().st_size, file) for file in paths)
    if kept is not None and [(file.name, file.num_bytes) for file in kept.files] == [each[:2] for each in found]:
        return OwnText(kept, [file for _, _, file in found])
    own = list_own_text(path)
    if own.digest != digest:
        raise ConfigError(
            f"the text at {path} is not the run's: its list of files has the digest {own.digest.hex()[:16]}…, the run "
            f"names {digest.hex()[:16]}…; name the run's text, or leave out --data to fetch it from other peers"
        )
    assert own.listed is not None, "it was just made"
    encoded = own.listed.encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / LIST_FILE, encoded)
    except OSError as error:
        raise StateError(
            f"cannot write {folder / LIST_FILE}: {error.strerror}; free some space, or choose another place with "
            "--state-directory"
        ) from None
    return own


def _kept_list(path: Path, digest: Digest) -> FileList | None:
    with contextlib.suppress(OSError, ConfigError):
        encoded = path.read_bytes()
        if sha256(encoded) == digest:
            return _parsed(encoded)
    return None


def root_of(path: str) -> Path:
    """Return the folder to which the names of a text's files are relative."""
    whole = Path(os.path.expanduser(path))
    if whole.is_dir():
        return whole
    parts = whole.parts[:-1]
    magic = next((index for index, part in enumerate(parts) if has_magic(part)), len(parts))
    return Path(*parts[:magic])


def _listed(name: str, path: Path) -> ListedFile:
    digests: list[Digest] = []
    with path.open("rb") as file:
        while content := file.read(FILE_PIECE_BYTES):
            digests.append(sha256(content))
        num_bytes = file.tell()
    if num_pieces(num_bytes) != len(digests):
        raise ConfigError(f"{path} changed while it was read; try again when nothing writes to it")
    return ListedFile(name=name, num_bytes=num_bytes, pieces=tuple(digests))


def available_ranges(listed: FileList, held: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of the stretches of the text, as one file after the other, whose pieces are held."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for number, piece in enumerate(listed.pieces()):
        stop = at + piece.num_bytes
        if held >> number & 1:
            if ranges and ranges[-1][1] == at:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((at, stop))
        at = stop
    return ranges
