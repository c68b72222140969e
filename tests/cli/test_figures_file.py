"""The target of `--json`."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.output import check_target, write_figures
from p2p_diloco.errors import ConfigError, StateError

PLAN = ("plan", "--parameters", "1M", "--islands", "2", "--uplink", "20mbit")


def test_figures_go_to_a_file_to_standard_output_or_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    for target in (None, "-", str(path)):
        check_target(target)
        write_figures(target, {"seeds": 3})
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out) == {"seeds": 3}


def test_a_missing_folder_is_reported_before_the_work_starts(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "figures.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_target(missing)
    assert main([*PLAN, "--json", missing]) == 2


def test_a_folder_instead_of_a_file_is_reported_before_the_work_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "."]) == 4
    captured = capsys.readouterr()
    assert "cannot write .: Is a directory; name another file with --json" in captured.err
    assert captured.out == ""


def test_an_unwritable_file_is_reported_before_the_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str = "r") -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StateError, match=r"cannot write .*: Permission denied; name another file with --json"):
        check_target(str(tmp_path / "figures.json"))


def test_checking_the_target_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a reader
    for name in ("old.json", "new.json", "pipe"):
        check_target(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "pipe"]
    assert (tmp_path / "old.json").read_text() == "{}"


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="name another file with --json"):
        write_figures(str(tmp_path), {})
