"""Replace a file or append to it atomically and durably."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a draft path, sync the draft, and rename it to `path`.

    Raises:
        OSError: the write failed; `path` is unchanged, and the draft is removed. Exceptions of `write` are passed on.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        write(draft)
        sync_file(draft)
        draft.replace(path)
        sync_file(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_all(path: Path, content: bytes) -> None:
    """Write `content` to `path`; returns nothing, as `replace_file` expects."""
    path.write_bytes(content)


def append_to_file(path: Path, content: bytes) -> None:
    """Append `content` to the file at `path` and sync it.

    Raises:
        OSError: the write failed; the file is truncated to its old length if possible.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            view = memoryview(content)
            while view:
                view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


class SpareDescriptor:
    """A file descriptor held in reserve for an essential write when a process has none left."""

    def __init__(self) -> None:
        self._spare: int | None = None
        self.take()

    def take(self) -> None:
        """Open it if it is not held, and there is one."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def release(self) -> None:
        """Close it, so that one file can be opened."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def __del__(self) -> None:
        self.release()


def sync_file(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
