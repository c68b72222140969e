"""`python -m research`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError
from research import experiment, table
from research.command import main
from research.experiments import Experiment
from research.scope import Scope, baselines
from research.setting import Outcome
from research.table import Table

TEXT = "".join(f"line {number} of a text\n" for number in range(4000))
SMALL = ["--size", "micro", "--islands", "2", "--steps", "8", "--sync-every", "8", "--seeds", "1"]


def test_a_table_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "usable_cores", lambda: 1)  # here, not in workers that must import PyTorch first
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    rows = ["25%-lost", "none-lost", "50%-lost"]
    words = ["loss", *SMALL, "--data", str(text), "--rows", ", ".join(rows)]
    to, keep = tmp_path / "figures.json", tmp_path / "kept.jsonl"
    assert main([*words, "--json", "-", "--keep", str(keep)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in figures["rows"]] == rows
    assert set(figures["gaps"]) == {"none-lost", "50%-lost"}
    assert main([*words, "--json", str(to), "--keep", str(keep)]) == 0
    assert len(keep.read_text().splitlines()) == 3
    assert json.loads(to.read_text()) == figures
    assert "what does it cost when contributions are lost?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "python -m research: error: "),
        (["loss", "--seeds", "1.5"], "--seeds is 1.5; expected a whole number"),
        (["loss", "--seeds", "many"], 'unable to convert "many" into int'),
        (["luck"], "unknown experiment 'luck'"),
        (["parity", "--size", "huge"], "--size is 'huge'"),
        (["parity", "--islands", "1"], "--islands is 1; expected at least 2"),
        (["parity", "--steps", "100"], "expected multiples of 32"),
        (["parity", "--sync-every", "12", "--steps", "24"], "and of 8"),
        (["loss", "--rows", "none-lost"], "--rows names none-lost; expected at least two rows"),
        (["parity", "--seeds", "0"], "--seeds is 0"),
        (["parity", "--windows", "0"], "--windows is 0; expected at least 1"),
        (["parity", "--steps", "64", "--tokens-per-parameter", "1"], "--steps and --tokens-per-parameter both set"),
        (["parity", "--tokens-per-parameter", "0"], "--tokens-per-parameter is 0; expected more than 0"),
        (["parity", "--inner-schedule", "linear"], "--inner-schedule"),
        (["primary", "--tuned", "nowhere.json"], "has no tuned values for micro, 4 islands, muon, cosine"),
        (["tune", "--rows", "gossip"], "unknown row 'gossip'"),
        (["parity", "--size", "huge", "--tokens-per-parameter", "1"], "--size is 'huge'"),
        (["parity", "--inner-rate", "0"], "--inner-rate is 0; expected more than 0 and less than 1"),
        (["parity", "--device", "tpu"], "unknown device 'tpu'"),
        (["parity", "--keep", "nowhere/kept.jsonl"], "there is no folder nowhere for --keep"),
        (["parity", "--keep", "a.json", "--json", "./a.json"], "--keep and --json both name a.json"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "size", "seeds"),
    [([], "tiny", 8), (["--quick"], "micro", 2), (["--quick", "--size", "small"], "small", 2)],
)
def test_quick_means_a_smaller_model_and_few_seeds(
    monkeypatch: pytest.MonkeyPatch, words: list[str], size: str, seeds: int
) -> None:
    asked: list[Experiment] = []

    def play(wanted: Experiment, **_: object) -> Table:
        asked.append(wanted)
        one = Outcome(name="row", seed=0, loss=1.5, tokens=1, bytes_sent_per_parameter=1.0, seconds=1.0)
        return Table(experiment=wanted, outcomes={"row": (one,)})

    monkeypatch.setattr(experiment, "run_experiment", play)
    assert main(["parity", *words]) == 0
    assert {setting.size for setting in asked[0].settings} == {size}
    assert {(setting.ticks, setting.inner) for setting in asked[0].settings} == {(480, "muon")}
    assert asked[0].seeds == seeds


@pytest.mark.parametrize(
    ("words", "steps", "windows"),
    [
        (["parity", "--tokens-per-parameter", "4"], 544, 16),  # 133,440 parameters, 1,024 tokens a step: 521.25
        (["primary"], 1312, 32),
        (["primary", "--quick"], 160, 32),
        (["primary", "--steps", "64", "--windows", "16"], 64, 16),
    ],
)
def test_the_length_of_a_trial_is_told_in_tokens_for_each_parameter(
    monkeypatch: pytest.MonkeyPatch, words: list[str], steps: int, windows: int
) -> None:
    scopes: list[Scope] = []

    def named(name: str, scope: Scope, *_: object) -> Experiment:
        scopes.append(scope)
        raise ConfigError("seen enough")

    monkeypatch.setattr(experiment, "experiment_named", named)
    monkeypatch.setattr(experiment, "evidence_named", named)
    assert main([*words, "--size", "micro", "--inner-schedule", "constant"]) == 2
    (scope,) = scopes
    assert (scope.ticks, scope.windows, scope.inner_schedule) == (steps, windows, "constant")
    assert {row.inner_schedule for row in (scope.ours(), *baselines(scope))} == {"constant"}


def test_progress_is_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    outcome = Outcome(name="row", seed=0, loss=1.5, tokens=1, bytes_sent_per_parameter=1.0, seconds=1.0)
    screen, pipe = Terminal(), io.StringIO()
    for stream in (screen, pipe):
        progress = experiment._Progress(stream)
        progress.heard(outcome, 3)
        progress.clear()
    assert "row: 1.5000; 3 trials left" in screen.getvalue()
    assert pipe.getvalue() == ""
