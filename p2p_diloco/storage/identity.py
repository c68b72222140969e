"""The identity file, which keeps a peer's id across restarts, and the lock that allows only one process to use it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2p_diloco.config.key_file import create_key_file, read_key_file
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey


def load_or_create_identity(path: Path) -> SigningKey:
    """Return the key in `path`; create one, readable only by its owner, if there is none.

    Two processes that start at once with the same path get the same key. libp2p's daemon reads the same file.

    Raises:
        ConfigError: the file cannot be read, or is not a key; it is not changed.
        StateError: there is none, and it cannot be written.
    """
    if not _exists(path):
        try:
            return create_key_file(path)
        except ConfigError:
            if not _exists(path):
                raise
    return read_key_file(path)


@contextmanager
def lock_identity(path: Path) -> Iterator[None]:
    """Lock the identity in `path` for this process; the lock ends with the process, however it exits.

    Forked children, such as DataLoader workers, do not inherit the lock, because they may outlive a killed parent.

    Two peers with the same identity would receive each other's messages, and neither would work.

    Raises:
        ConfigError: another process on this machine holds the lock, or the file cannot be locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot open the identity file {path}: {error.strerror}") from None
    try:
        _lock(descriptor, path)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


_held: set[int] = set()


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ConfigError(
                f"another process uses the identity {path}; stop it, or give this peer its own with --state-directory"
            ) from None
        raise ConfigError(
            f"cannot lock the identity file {path}: {error.strerror}; keep it on a local disk, see --identity-path"
        ) from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ConfigError(f"cannot look for the identity file {path}: {error.strerror}") from None
