"""No argument of a command line is ignored."""

from __future__ import annotations

import pytest

from p2p_diloco.cli.app import main

Captured = pytest.CaptureFixture[str]
PLAN = ["plan", "--parameters", "100M", "--islands", "4", "--uplink", "20mbit"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*PLAN, "--outer.momentum", "0.9"], "plan does not take --outer.momentum"),
        ([*PLAN, "@nosuch.toml"], "plan does not take @nosuch.toml"),
    ],
)
def test_a_command_without_a_manifest_takes_no_manifest_values(words: list[str], text: str, capsys: Captured) -> None:
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert text in errors
    known = "new, bootstrap, join, archive, status, pause, resume, limits, leave, sample and export"
    assert f"only {known} take files and" in errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*PLAN, "--cores", "1.5"], "--cores is 1.5; expected a whole number"),
        (["new", "x.toml", "--islands", "2.5"], "--islands is 2.5; expected a whole number"),
        (["join", "--found", "run.toml", "--until-round", "7.5"], "--until-round is 7.5; expected a whole number"),
        ([*PLAN, "--cores", "many"], 'unable to convert "many" into int'),
    ],
)
def test_a_count_that_is_not_whole_is_refused(words: list[str], text: str, capsys: Captured) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_a_whole_number_may_be_written_in_other_ways(capsys: Captured) -> None:
    for number in ("2.0", "0x2"):
        assert main([*PLAN, "--cores", number]) == 0
        assert "with 2 cores" in capsys.readouterr().out
