"""Replacing or lengthening a file whole or not at all, and on the disk before anybody relies on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a draft beside `path`, bring it to the disk, and put it in the place of what was there.

    Raises:
        OSError: the disk refuses; what was at `path` stays as it was, and no draft is left. What `write` raises passes.
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
    """Write `content` to `path`; a `write` for `replace_file` returns nothing."""
    path.write_bytes(content)


def append_to_file(path: Path, content: bytes) -> None:
    """Bring `content` to the disk behind what the file at `path` holds.

    Raises:
        OSError: the disk refuses; the file ends where it ended before, if it can be cut.
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


def sync_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
