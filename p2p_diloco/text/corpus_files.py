"""The files of a text, in an order that depends only on their names, read through a few memory maps."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import counted

_STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MAPPED_FILES = 64
"""Maximum number of open maps: each needs a file descriptor, and a folder may have more files than that limit."""


def list_corpus_files(path: str | Path | None) -> tuple[Path, ...]:
    """Return the non-empty files that `path` names, sorted by relative name.

    Args:
        path: a file, a folder (all files under it except hidden ones), a glob (`**` matches folders), or None for the
            source of the running Python's standard library.
    Raises:
        ConfigError: the path does not exist, or all its files are empty.
    """
    if path is None:
        return _stdlib_files()
    text = os.path.expanduser(str(path))
    if Path(text).is_file():
        found = [Path(text)]
    elif Path(text).is_dir():
        found = _sorted_files(Path(text))
    elif glob.has_magic(text):
        found = [Path(name) for name in sorted(glob.glob(text, recursive=True)) if Path(name).is_file()]
    else:
        raise ConfigError(f"text {text} does not exist; expected a file, a folder or a glob such as 'books/**/*.txt'")
    files = tuple(file for file in found if file.stat().st_size > 0)
    if not files:
        raise ConfigError(f"text {text} is empty ({counted(len(found), 'file')}); name at least one file with text")
    return files


def _stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's modules, except its tests and the files that depend on the build machine."""
    files = _sorted_files(Path(sysconfig.get_path("stdlib")), excluded=_STDLIB_EXCLUDED_FOLDERS)
    return tuple(
        file
        for file in files
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata") and file.stat().st_size > 0
    )


def _sorted_files(root: Path, *, excluded: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `root`, sorted by relative POSIX name so that all platforms agree.

    Hidden files and folders are skipped, and so are folders in `excluded`.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that os.walk skips these folders: site-packages may have a hundred thousand files.
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


class MappedFiles:
    """Concatenated files as one read-only text of bytes.

    Only the last few maps are in memory. Not thread-safe. A file must not be truncated while it is in use: the
    operating system kills a process that reads a map beyond the end of its file (SIGBUS).

    Attributes:
        num_bytes: length of the text.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._sizes = np.array([file.stat().st_size for file in files], dtype=np.int64)
        self._stops = np.cumsum(self._sizes)
        self._maps: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self.num_bytes = int(self._stops[-1])

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of each file, in order."""
        return tuple(int(size) for size in self._sizes)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of bytes `start` to `stop`, which may span several files.

        Raises:
            ConfigError: the size of a file has changed since it was opened.
        """
        if not 0 <= start <= stop <= self.num_bytes:
            raise ValueError(f"bytes {start} to {stop} are not within a text of {self.num_bytes}")
        pieces: list[NDArray[np.uint8]] = []
        index = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            file_start = int(self._stops[index] - self._sizes[index])
            piece = self._map(index)[start - file_start : stop - file_start]
            pieces.append(piece)
            start += len(piece)
            index += 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def _map(self, index: int) -> NDArray[np.uint8]:
        """Return the map of file `index`; drop the least recently used map if there are too many."""
        if (known := self._maps.get(index)) is not None:
            self._maps.move_to_end(index)
            return known
        file, expected = self._files[index], int(self._sizes[index])
        try:
            mapped: NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"text {file} cannot be read ({error}); make it readable and start again") from error
        if len(mapped) != expected:
            raise ConfigError(f"text {file} has {len(mapped)} bytes, {expected} when training began; start again")
        self._maps[index] = mapped
        if len(self._maps) > _MAPPED_FILES:
            self._maps.popitem(last=False)
        return mapped
