"""New files and folders: written atomically, and never over an existing one.

They are used for files that cannot be recreated, such as an identity or the manifest whose digest is the run id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from p2p_diloco.errors import ConfigError, StateError


def write_new_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path`, which must not exist; parent folders are created.

    Args:
        mode: permission bits, such as 0o600 for a file that only its owner may read.
    Raises:
        ConfigError: `path` already exists; it is not changed.
        StateError: the folder cannot be created or written, or the disk is full; no file is left.
    """
    taken = ConfigError(f"{path} already exists and is never overwritten; move it away, or name another file")
    if path.exists():
        raise taken
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_draft(draft, content, mode)
        try:
            # A link fails if the name is taken; a rename would overwrite a file that another process just wrote.
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


def write_new_folder(
    path: Path,
    files: Mapping[str, bytes],
    *,
    draft_name: str | None = None,
    check: Callable[[Path], None] = lambda draft: None,
) -> None:
    """Write files to a folder that must be empty or not exist; parent folders are created.

    Args:
        draft_name: name of the folder beside it in which the files are collected, for a caller that removes what a
            crash leaves of it; None: a random one.
        check: called with the folder in which the files are collected; if it raises an error, no file is left.
    Raises:
        ConfigError: `path` exists and is not an empty folder; it is not changed.
        StateError: the folder cannot be created or written, or the disk is full; no file is left.
    """
    check_new_folder(path)
    folder = path.resolve()
    draft = folder.with_name(draft_name or f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for name, content in files.items():
            _write_draft(draft / name, content, 0o666)
        check(draft)
        draft.rename(folder)  # fails if files have been added meanwhile
    except OSError as error:
        raise StateError(
            f"cannot write the folder {path}: {error.strerror}; check the disk, or name another folder"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_new_folder(path: Path) -> None:
    """Check up front that `write_new_folder` can write to `path`.

    Raises:
        ConfigError: it is a file or a broken link, is not empty, or is the current directory.
        StateError: it cannot be read.
    """
    try:
        if not path.exists():
            if path.is_symlink():
                raise ConfigError(f"{path} is a link to {os.readlink(path)}, which does not exist; name a new folder")
            return
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; name a new folder")
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty, and nothing in it is overwritten; name a new folder")
        if path.samefile(Path()):  # it gets replaced, which would leave the user's shell in a deleted folder
            raise ConfigError(f"{path} is the current directory; name a new folder in it, such as ./model")
    except OSError as error:
        raise StateError(f"cannot read the folder {path}: {error.strerror}; name another one") from None


def _write_draft(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
