"""Key files: an Ed25519 key on disk, in the format that libp2p daemons read.

The format is libp2p's protobuf message for identities, so the same file can start a daemon and sign a manifest. It is
written once, atomically, and never overwritten: a lost identity cannot be recreated.
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
    return _PREFIX + key.private_bytes() + key.peer


def decode_key(content: bytes, source: str) -> SigningKey:
    """Parse the contents of a key file; `source` names it in errors.

    Raises:
        ConfigError: it is not a libp2p Ed25519 key, or its halves do not match.
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
            f"{source} is damaged: its public half does not match its private half; restore it from a copy, or "
            "move it away to get a new identity"
        )
    return key


def create_key_file(path: Path) -> SigningKey:
    """Create a key and write it to `path`; raises as `write_key_file`."""
    key = SigningKey(secrets.token_bytes(PRIVATE_KEY_BYTES))
    write_key_file(path, key)
    return key


def write_key_file(path: Path, key: SigningKey) -> None:
    """Write `key` to `path` atomically, readable only by its owner.

    Raises:
        ConfigError: `path` already exists; it is not changed.
        StateError: the folder cannot be created or written.
    """
    write_new_file(path, encode_key(key), mode=0o600)


def is_key_file(path: Path) -> bool:
    """Return whether the file at `path` begins like a key file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_PREFIX)) == _PREFIX
    except OSError:
        return False


def read_key_file(path: Path) -> SigningKey:
    """Read the key at `path`.

    Raises:
        ConfigError: the file does not exist, cannot be read, is readable by others, or is not a key file.
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
