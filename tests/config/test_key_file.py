"""A key file is whole, private, and never overwritten."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.config.key_file import (
    KEY_FILE_BYTES,
    create_key_file,
    decode_key,
    encode_key,
    read_key_file,
    write_key_file,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey

KEY = SigningKey(bytes(range(32)))


@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_its_file(private: bytes) -> None:
    key = SigningKey(private)
    content = encode_key(key)
    assert content == bytes.fromhex("08011240") + private + key.peer
    assert len(content) == KEY_FILE_BYTES
    assert decode_key(content, "a file").private_bytes() == private


def test_a_new_key_is_private_and_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "organiser.key"
    key = create_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path).peer == key.peer
    assert os.listdir(path.parent) == [path.name], "no draft is left"


def test_two_new_keys_differ(tmp_path: Path) -> None:
    assert create_key_file(tmp_path / "a").peer != create_key_file(tmp_path / "b").peer


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "organiser.key"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="already exists and is never overwritten"):
        write_key_file(path, KEY)
    assert path.read_bytes() == b"precious"


def test_a_missing_key_error_explains_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no key file .*; copy it here, or make one with: p2p-diloco new"):
        read_key_file(tmp_path / "organiser.key")


def test_a_folder_is_not_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key file"):
        read_key_file(tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "organiser.key"
    write_key_file(path, KEY)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"open to other users \(mode {mode:04o}\); try: chmod 600 "):
        read_key_file(path)


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_the_modes_that_daemons_use_are_accepted(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "organiser.key"
    write_key_file(path, KEY)
    path.chmod(mode)
    assert read_key_file(path).peer == KEY.peer


@pytest.mark.parametrize(
    "content", [b"", b"x", encode_key(KEY)[:-1], encode_key(KEY) + b"\0", b"\x08\x00" + encode_key(KEY)[2:]]
)
def test_other_bytes_are_not_a_key(content: bytes) -> None:
    with pytest.raises(ConfigError, match=f"a file is not a key file: {len(content)} bytes, expected the 68 bytes"):
        decode_key(content, "a file")


def test_halves_that_do_not_match_are_reported_as_damage() -> None:
    content = bytearray(encode_key(KEY))
    content[10] ^= 1
    with pytest.raises(ConfigError, match="a file is damaged: its public half does not match its private half"):
        decode_key(bytes(content), "a file")
