"""`p2p-diloco simulate swarm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p_diloco.cli.app import main
from p2p_diloco.cli.simulate import mistake_named
from p2p_diloco.errors import ConfigError
from p2p_diloco.testing.command import peers_named

SMALL = ["simulate", "swarm", "--peers", "3..4"]


def test_every_promise_held_is_0_and_the_figures_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "figures.json"
    assert main([*SMALL, "--seeds", "3", "--kinds", "none", "--json", str(to)]) == 0
    figures = json.loads(to.read_text())
    assert {key: figures[key] for key in ("seeds", "violations", "failing_seeds")} == {
        "seeds": 3,
        "violations": 0,
        "failing_seeds": [],
    }
    assert figures["seconds"] > 0
    assert "3 seeds in" in capsys.readouterr().out


def test_a_broken_promise_is_1_with_its_trace_and_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--kinds", "none", "--plant", "double-count", "--seed", "7"]
    assert main([*words, "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failing_seeds"] == [7]
    assert "I2" in printed.err
    assert "replay: p2p-diloco simulate swarm --peers 3..4 --kinds none --plant double-count --seed 7" in printed.err
    assert main(words) == 1
    assert "1 seed in" in capsys.readouterr().out


def test_what_means_nothing_is_refused() -> None:
    assert peers_named("8") == (8, 8)
    for text in ("many", "8..3", "0..3", "3..9000", "1..2..3"):
        with pytest.raises(ConfigError, match="--peers is"):
            peers_named(text)
    with pytest.raises(ConfigError, match="--plant names 'typo'; expected one of double-count"):
        mistake_named("typo")
    assert mistake_named(None) is None
    assert main([*SMALL, "--seeds", "0"]) == 2
    assert main([*SMALL, "--first-seed", "-1"]) == 2


def test_a_long_run_goes_on_where_another_ended(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--kinds", "none", "--plant", "double-count", "--first-seed", "7", "--seeds", "2", "--json", "-"]
    assert main(words) == 1
    assert json.loads(capsys.readouterr().out)["failing_seeds"][0] == 7
