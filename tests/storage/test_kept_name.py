"""A peer keeps the name that its owner gave it in its state directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.storage.identity import NAME_FILE, read_name, write_name


def test_a_name_is_kept_until_it_is_removed(tmp_path: Path) -> None:
    assert read_name(tmp_path) == ""
    write_name(tmp_path, "Łódź 2")
    assert read_name(tmp_path) == "Łódź 2"
    with pytest.raises(ConfigError):
        write_name(tmp_path, "a\nb")
    assert read_name(tmp_path) == "Łódź 2"
    write_name(tmp_path, "")
    write_name(tmp_path, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"a\n\n", b"x" * 25, b"x" * 9999])
def test_a_file_without_a_name_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME_FILE).write_bytes(content)
    with pytest.raises(StateError, match="holds no name; set one with"):
        read_name(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot write .*missing"):
        write_name(tmp_path / "missing", "ada")
