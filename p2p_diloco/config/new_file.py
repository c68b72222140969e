"""New files and folders: written once, whole or not at all, and never over something that is there.

For what cannot be made again, such as an identity or the words that a run id is the digest of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
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


def write_new_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of files, which must be empty or not exist; folders on the way are made.

    Args:
        path: where.
        files: by name, all of it.
    Raises:
        ConfigError: something is at `path` already; it is left as it was.
        StateError: the folder cannot be made or written, or the disk is full; nothing is left behind.
    """
    check_new_folder(path)
    folder = path.resolve()
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for name, content in files.items():
            _write_draft(draft / name, content, 0o666)
        draft.rename(folder)  # refused by the system, should files have come meanwhile
    except OSError as error:
        raise StateError(
            f"cannot write the folder {path}: {error.strerror}; check the disk, or name another folder"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_new_folder(path: Path) -> None:
    """See that `write_new_folder` may write to `path`, before anything takes long.

    Raises:
        ConfigError: it is no folder, holds something, or is the one that this process works in.
        StateError: it cannot be read.
    """
    try:
        if not path.exists():
            return
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; name a new folder")
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty, and nothing in it is overwritten; name a new folder")
        if path.samefile(Path()):  # it is replaced, and a shell would stay in one that is gone
            raise ConfigError(f"{path} is the folder that you are in; name a new one in it, such as ./model")
    except OSError as error:
        raise StateError(f"cannot read the folder {path}: {error.strerror}; name another one") from None


def _write_draft(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
