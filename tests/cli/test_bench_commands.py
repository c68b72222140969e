"""Commands that measure are listed, and load nothing heavy to say so."""

from __future__ import annotations

import pytest

from p2p_diloco.cli.app import main


def test_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    listed = capsys.readouterr().out
    assert "vectors" in listed
    assert "averaging" in listed
    assert "memory" in listed
    assert "state" in listed
    assert "training" in listed
    assert "install-torchft" in listed
