"""New files: written once, whole or not at all, and never over something that is there.

For what cannot be made again, such as an identity or the words that a run id is the digest of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from p2p_diloco.errors import ConfigError, StateError


def write_new_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path`, which must not exist; folders on the way are made.

    Args:
        path: where.
        content: what, all of it.
        mode: permission bits, such as 0o600 for what only its owner may read.
    Raises:
        ConfigError: there is something at `path` already; it is left as it was.
        StateError: the folder cannot be made or written, or the disk is full; nothing is left behind.
    """
    taken = ConfigError(f"{path} exists already and is never overwritten; move it away, or name another file")
    if path.exists():
        raise taken
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_draft(draft, content, mode)
        try:
            # A link fails when the name is taken, where a rename would overwrite what another process just wrote.
            os.link(draft, path)
        except FileExistsError:
            raise taken from None
    except OSError as error:
        raise StateError(
            f"cannot write {path}: {error.strerror}; check the folder and the disk, or name another file"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _write_draft(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
