"""Key files: an Ed25519 key at rest, in the form that libp2p daemons read.

The form is the protobuf message in which libp2p keeps identities, so one
file starts a daemon and signs a manifest. It is written once, whole or not at all, and never overwritten: a lost
identity cannot be made again.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from p2p_diloco.config.new_file import write_new_file
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import PRIVATE_KEY_BYTES, SigningKey

# Protobuf {1: type = 1 (Ed25519), 2: 64 bytes}: private seed, public key. Source: libp2p specs, peer-ids.
_PREFIX = bytes.fromhex("08011240")
KEY_FILE_BYTES = len(_PREFIX) + 2 * PRIVATE_KEY_BYTES


def encode_key(key: SigningKey) -> bytes:
    """Return the bytes of `key`'s file."""
    return _PREFIX + key.private_bytes() + key.peer


def decode_key(content: bytes, source: str) -> SigningKey:
    """Read the bytes of a key file; `source` names it in errors.

    Raises:
        ConfigError: other bytes than a libp2p Ed25519 key, or two halves that do not belong together.
    """
    if len(content) != KEY_FILE_BYTES or not content.startswith(_PREFIX):
        raise ConfigError(
            f"{source} is not a key file: {len(content)} bytes, expected the {KEY_FILE_BYTES} bytes of a libp2p "
            "Ed25519 key; restore it from a copy, or move it away to get a new identity"
        )
    private = content[len(_PREFIX) : len(_PREFIX) + PRIVATE_KEY_BYTES]
    key = SigningKey(private)
    if content[len(_PREFIX) + PRIVATE_KEY_BYTES :] != key.peer:
        raise ConfigError(
            f"{source} is damaged: its public half does not belong to its private half; restore it from a copy, or "
            "move it away to get a new identity"
        )
    return key


def create_key_file(path: Path) -> SigningKey:
    """Make a new key and keep it at `path`; errors as `write_key_file`."""
    key = SigningKey(secrets.token_bytes(PRIVATE_KEY_BYTES))
    write_key_file(path, key)
    return key


def write_key_file(path: Path, key: SigningKey) -> None:
    """Keep `key` at `path`, readable by its owner alone, whole or not at all.

    Raises:
        ConfigError: there is something at `path` already; it is left as it was.
        StateError: the folder cannot be made or written.
    """
    write_new_file(path, encode_key(key), mode=0o600)


def is_key_file(path: Path) -> bool:
    """Return whether the file at `path` begins as a key file does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_PREFIX)) == _PREFIX
    except OSError:
        return False


def read_key_file(path: Path) -> SigningKey:
    """Read the key at `path`.

    Raises:
        ConfigError: there is no such file, it cannot be read, others may read it, or it holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}; copy it here, or make one with: p2p-diloco new") from None
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"the key file {path} is open to other users (mode {mode:04o}); try: chmod 600 {path}")
    return decode_key(content, str(path))
