"""The lab's commands: they are there, and asking for help loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2p_diloco.cli.app import main

HELP_IN_A_PROCESS = """
import sys
from p2p_diloco.cli.app import main
try:
    main(["experiment", "--help"])
except SystemExit:
    pass
print(sorted(name for name in ("torch", "hivemind", "numpy") if name in sys.modules))
"""


def test_each_command_explains_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for command, flag in (("experiment", "--windows"), ("plan", "--uplink"), ("replay", "--data-parallel")):
        assert main([command, "--help"]) == 0
        assert flag in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_IN_A_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
