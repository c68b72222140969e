"""`python -m p2p_diloco.testing`."""

from __future__ import annotations

import json

import pytest

from p2p_diloco.testing.command import main


def test_seed_is_played_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "kill", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "seed 1: 3 peers" in shown
    assert "replay: python -m p2p_diloco.testing swarm --peers 3 --kinds kill --seed 1 --trace" in shown


def test_replay_of_a_sound_seed_prints_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "kill", "--seed", "1", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "p2    starts     incarnation 1" in shown
    assert "Opening(" in shown
    assert "memory at" not in shown
    assert "every invariant held" in shown


def test_figures_of_a_broken_seed_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swarm", "--peers", "3", "--seeds", "1", "--kinds", "none", "--plant", "double-count", "--json"]
    assert main(words) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["failing_seeds"] == [0]


def test_broken_seed_is_shown_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "none", "--seed", "0", "--trace", "--plant", "double-count"]) == 1
    shown = capsys.readouterr().out
    assert "I2" in shown
    assert "Opening(" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["swarm", "--peers", "9..3"], "--peers is '9..3'; expected 1 to 512, the smaller number first"),
        (["swarm", "--peers", "few"], "--peers is 'few'; expected two numbers like 3..64, or one"),
        (["swarm", "--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["mistakes", "none"], "no mistake is called 'none'; expected one of double-count"),
    ],
)
def test_option_that_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err
