"""A printed command runs in the shell in which it was printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_diloco.wording import join_line, own_command

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = f"""#!{sys.executable}
import sys
from p2p_diloco.app.cli.app import main
sys.exit(main())
"""


def installed(folder: Path) -> Path:
    """Return a program like those that pip writes, in `folder`."""
    program = folder / "p2p-diloco"
    folder.mkdir(parents=True, exist_ok=True)
    program.write_text(SCRIPT)
    program.chmod(0o755)
    return program


def next_line(typed: str, folder: Path, *path: Path) -> str:
    """Return the command at the end of `new`'s output when a shell in `folder` runs it as `typed`."""
    there = [*map(str, path), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(there), "PYTHONPATH": str(PROJECT), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        ["/bin/sh", "-c", f"{typed} new --step-seconds 0.1"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return next(line for line in run.stdout.splitlines() if line.startswith("next: ")).removeprefix("next: ")


def test_in_a_checkout_the_command_is_the_path_as_typed(tmp_path: Path) -> None:
    installed(tmp_path / ".venv" / "bin")
    assert next_line(".venv/bin/p2p-diloco", tmp_path) == ".venv/bin/p2p-diloco bootstrap run.toml"


def test_a_path_with_a_space_is_quoted(tmp_path: Path) -> None:
    installed(tmp_path / "my tools")
    assert next_line("'my tools/p2p-diloco'", tmp_path) == "'my tools/p2p-diloco' bootstrap run.toml"


def test_an_installed_tool_is_called_by_its_name(tmp_path: Path) -> None:
    tools = installed(tmp_path / "tools").parent
    assert next_line("p2p-diloco", tmp_path, tools) == "p2p-diloco bootstrap run.toml"


def test_a_link_on_the_path_is_the_same_tool(tmp_path: Path) -> None:
    program = installed(tmp_path / "environment")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "p2p-diloco").symlink_to(program)
    assert next_line("environment/p2p-diloco", tmp_path, tmp_path / "tools") == "p2p-diloco bootstrap run.toml"


def test_another_tool_of_the_same_name_is_not_mistaken_for_this_one(tmp_path: Path) -> None:
    other = installed(tmp_path / "other").parent
    installed(tmp_path / ".venv" / "bin")
    assert next_line(".venv/bin/p2p-diloco", tmp_path, other) == ".venv/bin/p2p-diloco bootstrap run.toml"


def test_a_module_is_run_as_a_module(tmp_path: Path) -> None:
    expected = f"{sys.executable} -m p2p_diloco bootstrap run.toml"
    assert next_line(f"{sys.executable} -X utf8 -m p2p_diloco", tmp_path) == expected


@pytest.mark.parametrize("started", ["", "train.py", "/opt/tools/pytest/__main__.py"])
def test_in_another_program_the_command_is_the_plain_name(started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert own_command("status", "--state-directory", "my peer") == "p2p-diloco status --state-directory 'my peer'"
    assert (
        join_line("p2pdiloco://ab?b=/ip4/1.2.3.4", own_model=False) == 'p2p-diloco join "p2pdiloco://ab?b=/ip4/1.2.3.4"'
    )
