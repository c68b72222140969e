"""Where torchft is looked for, and what is said where it is not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_environment
from benchmarks.training import torchft_environment
from benchmarks.training.torchft_environment import (
    PACKAGE,
    environment_folder,
    install_torchft,
    torchft_interpreter,
)
from p2p_diloco.errors import ConfigError, NetworkError


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend to make environments and to run pip; whoever sets `code[0]` lets it fail."""
    code = [0]

    def create(folder: Path, with_pip: bool) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "lib" / "python").mkdir(parents=True)

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        code.append(command)  # type: ignore[arg-type]
        return subprocess.CompletedProcess(command, code[0], "", "no such wheel")

    def get_path(name: str, *where: Any) -> str:
        return str(Path(where[1]["base"]) / "lib" / "python") if where else "/seen/site-packages"

    monkeypatch.setattr(side_environment.venv, "create", create)
    monkeypatch.setattr(side_environment.subprocess, "run", run)
    monkeypatch.setattr(side_environment.sysconfig, "get_path", get_path)
    return code


def test_where_it_is_not_installed_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with: python -m benchmarks install-torchft .* --against blocking"):
        torchft_interpreter(tmp_path)


def test_it_is_installed_once_and_sees_the_environment_that_asked(tmp_path: Path, pip: list[Any]) -> None:
    folder, said = tmp_path / "torchft", list[str]()
    assert install_torchft(said.append, folder) == folder
    assert torchft_interpreter(folder) == str(folder / "bin" / "python")
    assert (
        folder / "lib" / "python" / "zz-seen.pth"
    ).read_text() == "import site; site.addsitedir('/seen/site-packages')\n"
    assert pip[1][-1] == PACKAGE
    install_torchft(said.append, folder)
    assert len(pip) == 2
    assert said[-1] == f"{PACKAGE} is installed in {folder}"


def test_what_pip_could_not_finish_is_removed(tmp_path: Path, pip: list[Any]) -> None:
    folder = tmp_path / "torchft"
    pip[0] = 1
    with pytest.raises(NetworkError, match=r"pip could not install torchft-nightly==.*: no such wheel"):
        install_torchft(print, folder)
    assert not folder.exists()


def test_another_environment_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment_folder()
    monkeypatch.setattr(torchft_environment.sysconfig, "get_path", lambda name: "/elsewhere")
    assert environment_folder() != here
    assert environment_folder().parent == here.parent
