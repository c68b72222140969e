"""Benchmarks are listed, and asking for help loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.command import main

HELP_IN_A_PROCESS = """
import sys
from benchmarks.command import main
try:
    main(["averaging", "--help"])
except SystemExit:
    pass
print(sorted(name for name in ("torch", "hivemind", "numpy") if name in sys.modules))
"""


def test_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("vectors", "averaging", "memory", "state", "training", "failures", "goodput", "install-torchft"):
        assert name in listed


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_IN_A_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["vec"], "python -m benchmarks: error: unknown command vec; did you mean vectors?"),
        (["vectors", "--outer.momentum=0.9"], "unknown option --outer.momentum; see python -m benchmarks vectors"),
        (["vectors", "--repeat", "1.5"], "--repeat is 1.5; expected a whole number"),
    ],
)
def test_a_word_that_does_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err
