"""Replace a file or append to it atomically and durably."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path


def replace_file(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write a draft, sync it, and rename it to `path`.

    Args:
        content: of the file, or a function that writes it to a path.
    Raises:
        OSError: the write failed; `path` is unchanged, and the draft is removed. Other exceptions are passed on.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        if isinstance(content, bytes):
            draft.write_bytes(content)
        else:
            content(draft)
        sync_file(draft)
        draft.replace(path)
        sync_file(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_at(descriptor: int, offset: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
    """Write buffers to an open file, in one call if possible; return the end offset."""
    views = [memoryview(buffer) for buffer in buffers]
    while views:
        written = os.pwritev(descriptor, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
    return offset


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
