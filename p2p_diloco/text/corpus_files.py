"""The files of a text, in an order that depends only on their names."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.rate import counted
from p2p_diloco.text.token_shards import is_shard_folder
from p2p_diloco.text.unpacked import HEAD_BYTES, is_packed, why_no_text

_FINGERPRINT_PIECES = 1024
_FINGERPRINT_PIECE_BYTES = 16_384
_STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def list_corpus_files(
    path: str | Path | None,
    skip: Callable[[Path, str], None] | None = None,
    on_hidden: Callable[[Path], None] = lambda place: None,
) -> tuple[Path, ...]:
    """Return the non-empty files that `path` names, sorted by relative name.

    Args:
        path: a file, a folder (all files under it except hidden ones), a glob (`**` matches folders), or None for the
            source of the running Python's standard library.
        skip: called with what a folder holds that is no readable file, and why; None: that is an error.
        on_hidden: called with each hidden file and folder in a folder.
    Raises:
        ConfigError: the path does not exist, all its files are empty, or a link in it leads nowhere.
    """
    if path is None:
        return _stdlib_files()
    text = os.path.expanduser(str(path))
    if Path(text).is_file():
        found = [Path(text)]
    elif Path(text).is_dir():
        found = _sorted_files(Path(text), skip=skip, on_hidden=on_hidden)
    elif os.path.lexists(text):
        raise ConfigError(f"text {text} {_why_no_file(Path(text))}; expected a file, a folder or a glob")
    elif glob.has_magic(text):
        found = _matching_files(text, skip, on_hidden)
    else:
        raise ConfigError(f"text {text} does not exist; expected a file, a folder or a glob such as 'books/**/*.txt'")
    files = tuple(file for file in found if file.stat().st_size > 0)
    if not files:
        raise ConfigError(f"text {text} is empty ({counted(len(found), 'file')}); name at least one file with text")
    return files


def list_byte_files(path: str | Path | None) -> tuple[Path, ...]:
    """Return the files of a text whose bytes are trained on as they are, or of a folder of tokens.

    Raises:
        ConfigError: the path has no text, or a file holds it in another form, such as compressed.
    """
    files = list_corpus_files(path)
    for file in () if path is None or is_shard_folder(Path(path).expanduser()) else files:
        try:
            with file.open("rb") as opened:
                head = opened.read(HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"text {file} cannot be read ({error.strerror}); make it readable") from None
        if (why := why_no_text(head)) is not None:
            raise ConfigError(f"{file} {why[0]}; {why[1]}")
        if is_packed(head):
            raise ConfigError(
                f"{file} is compressed or a table, and without a tokenizer a run trains on the bytes as they are; "
                "unpack it, or make tokens of it with p2p-diloco tokenize"
            )
    return files


def _matching_files(
    pattern: str, skip: Callable[[Path, str], None] | None, on_hidden: Callable[[Path], None]
) -> list[Path]:
    """Return the files that a pattern matches, and those in folders that its last part matches."""
    found: list[Path] = []
    for place in map(Path, sorted(set(glob.glob(pattern, recursive=True)))):
        if place.is_file():
            found.append(place)
        elif not place.is_dir():
            _refuse(place, _why_no_file(place), skip)
        elif "**" not in pattern:
            found += _sorted_files(place, skip=skip, on_hidden=on_hidden)
    return found


def _why_no_file(path: Path) -> str:
    return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "is no regular file"


def _stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's modules, except its tests and the files that depend on the build machine."""
    files = _sorted_files(Path(sysconfig.get_path("stdlib")), excluded=_STDLIB_EXCLUDED_FOLDERS)
    return tuple(
        file
        for file in files
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata") and file.stat().st_size > 0
    )


def _sorted_files(
    root: Path,
    *,
    excluded: frozenset[str] = frozenset(),
    skip: Callable[[Path, str], None] | None = None,
    on_hidden: Callable[[Path], None] = lambda place: None,
) -> list[Path]:
    """Return the files under `root`, sorted by relative POSIX name so that all platforms agree.

    Hidden files and folders are skipped, and so are folders in `excluded`. Links to folders are followed, each folder
    once, so a loop of links ends.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        _refuse(Path(error.filename), f"cannot be read ({error.strerror})", skip)

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        status = os.stat(folder)
        is_new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        for name in (name for name in (*subfolders, *names) if is_new and name[0] == "."):
            on_hidden(Path(folder, name))
        # In place, so that os.walk skips these folders: site-packages may have a hundred thousand files.
        subfolders[:] = [name for name in sorted(subfolders) if is_new and name not in excluded and name[0] != "."]
        for file in (Path(folder, name) for name in names if is_new and not name.startswith(".")):
            if file.is_file():
                found.append(file)
            else:
                _refuse(file, _why_no_file(file), skip)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _refuse(path: Path, why: str, skip: Callable[[Path, str], None] | None) -> None:
    if skip is None:
        raise ConfigError(f"{path} {why}; mend it, or take it out of the text")
    skip(path, why)


class MappedFiles:
    """Concatenated files as one read-only text of bytes.

    A file is opened for each read, which costs some microseconds: a map of a file that becomes shorter kills the
    process (SIGBUS), and shows other bytes once the file is overwritten. A new modification time, as a backup or a copy
    sets it, is compared by the fingerprint.

    Args:
        is_arriving: the files have their lengths, but their bytes are still being fetched.

    Attributes:
        num_bytes: length of the text.
    """

    def __init__(self, files: tuple[Path, ...], *, is_arriving: bool = False) -> None:
        self._files = files
        self._is_arriving = is_arriving
        self._stamps = [self._stamp(file.stat()) for file in files]
        self._stops = np.cumsum(self.file_sizes, dtype=np.int64)
        self.num_bytes = int(self._stops[-1])

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of each file, in order."""
        return tuple(size for size, _ in self._stamps)

    @cached_property
    def fingerprint(self) -> Digest:
        """Digest over the sizes and 1,024 evenly spread pieces of 16 KiB: a text of up to 16 MiB is covered fully.

        The bound keeps the start fast even with a terabyte of text.
        """
        sizes = np.array(self.file_sizes, dtype="<i8").tobytes()
        pieces = min(_FINGERPRINT_PIECES, -(-self.num_bytes // _FINGERPRINT_PIECE_BYTES))
        starts = (self.num_bytes * index // pieces for index in range(pieces))
        return sha256(
            sizes,
            *(self.read(start, min(start + _FINGERPRINT_PIECE_BYTES, self.num_bytes)).tobytes() for start in starts),
        )

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of bytes `start` to `stop`, which may span several files.

        Raises:
            ConfigError: a file has changed since it was opened, or cannot be read.
        """
        if not 0 <= start <= stop <= self.num_bytes:
            raise ValueError(f"bytes {start} to {stop} are not within a text of {self.num_bytes}")
        pieces: list[bytes] = []
        index = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            file_stop = int(self._stops[index])
            file_start = file_stop - self._stamps[index][0]
            pieces.append(self._read(index, start - file_start, min(stop, file_stop) - file_start))
            start = file_stop
            index += 1
        return np.frombuffer(bytearray().join(pieces), np.uint8)

    def _read(self, index: int, start: int, stop: int) -> bytes:
        file, expected = self._files[index], self._stamps[index]
        try:
            with file.open("rb") as opened:
                found = self._stamp(os.fstat(opened.fileno()))
                opened.seek(start)
                piece = opened.read(stop - start)
            is_same = found == expected or (found[0] == expected[0] and self._has_same_fingerprint())
        except OSError as error:
            raise ConfigError(f"text {file} cannot be read ({error}); make it readable and start again") from error
        if not is_same or len(piece) < stop - start:
            raise ConfigError(
                f"text {file} is not what it was when training began ({expected[0]} bytes then, {found[0]} now); put "
                "the run's text back and start again"
            )
        return piece

    def _has_same_fingerprint(self) -> bool:
        """Return whether the files are what they were when the fingerprint was taken; if so, take their new times."""
        if "fingerprint" not in vars(self):
            return False
        now = MappedFiles(self._files)
        is_same = now.fingerprint == self.fingerprint
        if is_same:
            self._stamps = now._stamps
        return is_same

    def _stamp(self, found: os.stat_result) -> tuple[int, int]:
        return found.st_size, 0 if self._is_arriving else found.st_mtime_ns
