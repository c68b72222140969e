"""Identity files are created once, kept, and used by one process at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.storage import identity
from p2p_diloco.storage.identity import load_or_create_identity, lock_identity


def test_a_new_identity_is_kept_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "peer.key"
    key = load_or_create_identity(path)
    assert load_or_create_identity(path).peer == key.peer
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["peer.key"]


def test_the_file_has_the_format_that_libp2p_reads(tmp_path: Path) -> None:
    key = load_or_create_identity(tmp_path / "peer.key")
    assert (tmp_path / "peer.key").read_bytes() == bytes.fromhex("08011240") + key.private_bytes() + key.peer


def test_a_broken_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(b"broken")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key file: 6 bytes"):
        load_or_create_identity(path)
    assert path.read_bytes() == b"broken"


def test_a_file_created_meanwhile_by_another_process_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peer.key"
    create = create_key_file
    made: list[PeerId] = []

    def create_after_another(target: Path) -> object:
        made.append(create(target).peer)
        return create(target)

    monkeypatch.setattr(identity, "create_key_file", create_after_another)
    assert [load_or_create_identity(path).peer] == made


def test_an_error_during_creation_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> object:
        raise ConfigError("no room")

    monkeypatch.setattr(identity, "create_key_file", refuse)
    with pytest.raises(ConfigError, match="no room"):
        load_or_create_identity(tmp_path / "peer.key")


def test_a_path_that_cannot_be_checked_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot look for the identity file .*: File name too long"):
        load_or_create_identity(tmp_path / ("x" * 300))


def test_an_identity_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    load_or_create_identity(path)
    with (
        lock_identity(path),
        pytest.raises(ConfigError, match=r"another process uses the identity .*peer\.key; stop it, or give this peer"),
        lock_identity(path),
    ):
        pass
    with lock_identity(path):
        pass


def test_the_lock_is_visible_to_other_processes_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    load_or_create_identity(path)
    attempt = (
        "import sys; from pathlib import Path; from p2p_diloco.storage.identity import lock_identity\n"
        "with lock_identity(Path(sys.argv[1])): print('held')"
    )
    command = [sys.executable, "-c", attempt, str(path)]
    root = Path(identity.__file__).parents[2]
    with lock_identity(path):
        refused = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert "another process uses the identity" in refused.stderr
    assert subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout == "held\n"


def test_a_missing_file_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot open the identity file"), lock_identity(tmp_path / "none"):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peer.key"
    load_or_create_identity(path)

    def fail(_: int, __: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(ConfigError, match="keep it on a local disk"), lock_identity(path):
        pass
