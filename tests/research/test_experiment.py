"""`python -m research`."""

from __future__ import annotations

import io

import pytest

from p2p_diloco.errors import ConfigError
from research import experiment
from research.command import main
from research.scope import Scope
from research.setting import Outcome

TEXT = "".join(f"line {number} of a text\n" for number in range(4000))
SMALL = ["--size", "micro", "--islands", "2", "--steps", "8", "--sync-every", "8", "--seeds", "1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "python -m research: error: "),
        (["means", "--seeds", "1.5"], "--seeds is 1.5; expected a whole number"),
        (["means", "--seeds", "many"], 'unable to convert "many" into int'),
        (["luck"], "unknown experiment 'luck'; expected one of tune, primary"),
        (["means", "--size", "huge"], "--size is 'huge'"),
        (["means", "--islands", "1"], "--islands is 1; expected at least 2"),
        (["means", "--steps", "100"], "--steps is 100; expected a multiple of 32"),
        (["means", "--rows", "p2p-diloco-every-8"], "--rows names p2p-diloco-every-8; expected at least two rows"),
        (["means", "--seeds", "0"], "--seeds is 0"),
        (["means", "--windows", "0"], "--windows is 0; expected at least 1"),
        (["mixed", "--speeds", "1,x"], "--speeds is '1,x'; expected a number for each island, such as 1,1,1,1,16"),
        (["mixed", "--speeds", "1,0"], "--speeds is '1,0'; expected a number for each island, such as 1,1,1,1,16"),
        (["mixed", "--speeds", "16"], "--speeds is '16'; expected a number for each island, such as 1,1,1,1,16"),
        (["means", "--steps", "64", "--tokens-per-parameter", "1"], "--steps and --tokens-per-parameter both set"),
        (["means", "--tokens-per-parameter", "0"], "--tokens-per-parameter is 0; expected more than 0"),
        (["means", "--inner-schedule", "linear"], "--inner-schedule"),
        (["means", "--inner-rate", "0"], "--inner-rate is 0; expected more than 0 and less than 1"),
        (["means", "--device", "tpu"], "unknown device 'tpu'"),
        (["means", "--keep", "nowhere/kept.jsonl"], "there is no folder nowhere for --keep"),
        (["means", "--keep", "a.json", "--json", "./a.json"], "--keep and --json both name a.json"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "steps", "windows"),
    [
        (["primary"], 1312, 32),  # 133,440 parameters, 2,048 tokens a step: 1,303.1
        (["primary", "--tokens-per-parameter", "4"], 288, 32),
        (["primary", "--quick"], 160, 32),
        (["primary", "--steps", "64", "--windows", "16"], 64, 16),
    ],
)
def test_the_length_of_a_trial_is_told_in_tokens_for_each_parameter(
    monkeypatch: pytest.MonkeyPatch, words: list[str], steps: int, windows: int
) -> None:
    scopes: list[Scope] = []

    def named(name: str, scope: Scope, *_: object) -> None:
        scopes.append(scope)
        raise ConfigError("seen enough")

    monkeypatch.setattr(experiment, "evidence_named", named)
    assert main([*words, "--inner-schedule", "constant"]) == 2
    (scope,) = scopes
    assert (scope.ticks, scope.windows, scope.inner_schedule) == (steps, windows, "constant")
    assert scope.is_quick == ("--quick" in words)


def test_progress_is_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    outcome = Outcome(name="row", seed=0, loss=1.5, tokens=1, bytes_sent_per_parameter=1.0, seconds=1.0)
    screen, pipe = Terminal(), io.StringIO()
    for stream in (screen, pipe):
        progress = experiment.Progress(stream)
        progress.heard(outcome, 3)
        progress.clear()
    assert "row: 1.5000; 3 trials left" in screen.getvalue()
    assert pipe.getvalue() == ""
