"""Replace a file or append to it atomically and durably."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

MOST_BUFFERS = 512
"""Maximum buffers in one write; the system's limit is 1,024."""


def replace_file(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write a draft, or have `content` write it to a path, sync it, and rename it to `path`.

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


def write_at(
    path: Path, offset: int, buffers: Sequence[bytes | bytearray | memoryview], *, is_end: bool = False
) -> None:
    """Write buffers into a file, with as few calls as possible.

    Args:
        is_end: whether the file ends at `offset`, except for the remains of a failed write; created if missing.
    Raises:
        OSError: the write failed; some of the bytes may be written.
    """
    descriptor = os.open(path, os.O_WRONLY | (os.O_CREAT if is_end else 0), 0o644)
    try:
        if is_end and os.fstat(descriptor).st_size != offset:
            os.ftruncate(descriptor, offset)
        views = deque(memoryview(buffer) for buffer in buffers)
        while views:
            written = os.pwritev(descriptor, list(islice(views, MOST_BUFFERS)), offset)
            offset += written
            while views and written >= len(views[0]):
                written -= len(views.popleft())
            if views:
                views[0] = views[0][written:]
    finally:
        os.close(descriptor)


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
