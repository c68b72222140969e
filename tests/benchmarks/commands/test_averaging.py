"""`python -m benchmarks averaging`: what it prints and refuses; real processes play in tests/benchmarks/processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.averaging.comparison import ComparisonPlan
from benchmarks.averaging.figures import MIB, Comparison, Turn
from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, OURS
from benchmarks.command import main
from benchmarks.commands import averaging

TURN = Turn(
    wall_seconds=0.5,
    cpu_seconds=0.24,
    wire_bytes=32_000_000,
    peak_rss_bytes=400 * MIB,
    others_cpu_seconds=0.0,
    results_equal=True,
)
THEIRS = replace(TURN, wall_seconds=2.0, cpu_seconds=1.2, results_equal=False)
COMPARISON = Comparison(
    num_peers=4,
    parameters=10_000_000,
    codec="int4",
    turns={OURS: [TURN] * 5, HIVEMIND_FLOAT16: [THEIRS] * 5, GLOO: [TURN] * 5},
    on_own_network=True,
    kept_alive=True,
    num_cores=2,
)


def test_ratios_come_first_and_who_differs_is_told() -> None:
    lines = averaging.averaging_lines(COMPARISON)
    assert lines[0].startswith("4 peers, 10,000,000 parameters, int4, 2 cores, 5 repeats in turn")
    ratios = next(line for line in lines if line.startswith(HIVEMIND_FLOAT16))
    assert "4.00x (4.00–4.00)" in ratios
    assert "5.00x (5.00–5.00)" in ratios
    ours, theirs = (line for line in lines if line.endswith(("equal", "DIFFER")) and not line.startswith(GLOO))
    assert ours.startswith(OURS)
    assert "0.500 (0.500–0.500)" in ours
    assert "6.0 (6.0–6.0)" in ours
    assert ours.endswith("equal")
    assert theirs.endswith("DIFFER")


def test_whose_bytes_were_counted_is_said() -> None:
    assert any("in a private network per system" in line for line in averaging.averaging_lines(COMPARISON))
    shared = averaging.averaging_lines(replace(COMPARISON, on_own_network=False, kept_alive=False))
    assert any("OTHER PROGRAMS' TOO" in line for line in shared)
    assert any("started for each turn" in line for line in shared)


def test_alone_there_are_no_ratios() -> None:
    assert not any(
        "times ours" in line for line in averaging.averaging_lines(replace(COMPARISON, turns={OURS: [TURN]}))
    )


def test_the_command_plays_what_was_asked_for_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[ComparisonPlan] = []

    def play(plan: ComparisonPlan, show: object) -> Comparison:
        asked.append(plan)
        return COMPARISON

    monkeypatch.setattr(averaging, "run_comparison", play)
    monkeypatch.setattr("sys.platform", "linux")
    file = tmp_path / "figures.json"
    words = ["--peers", "4", "--parameters", "10M", "--against", "gloo", "--repeat", "5", "--json", str(file)]
    assert main(["averaging", *words]) == 0
    assert asked == [
        ComparisonPlan(systems=(OURS, GLOO), num_peers=4, parameters=10_000_000, codec="int4", spans=4, repeats=5)
    ]
    document = json.loads(file.read_text())
    assert document["systems"][OURS]["wall_seconds"] == 0.5
    assert document["command"].startswith("averaging --peers 4 --parameters 10M")
    assert " --spans 4 " in document["command"]
    assert document["machine"]["cores"] >= 1
    assert "times ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--peers", "1"], "--peers is 1; expected 2 to 16"),
        (["--peers", "17"], "--peers is 17; expected 2 to 16"),
        (["--parameters", "5"], "--parameters is '5'"),
        (["--repeat", "0"], "--repeat is 0; expected at least 1"),
        (["--codec", "int5"], "--codec is 'int5'; expected one of"),
        (["--against", "nccl"], "--against names 'nccl'"),
        (["--spans", "3"], "--spans is 3; expected 4 to 2048, one for each peer at least"),
        (["--json", "nowhere/figures.json"], "nowhere"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["averaging", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_without_proc_there_is_nothing_to_measure_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["averaging"]) == 2
    assert "run it on Linux" in " ".join(capsys.readouterr().err.split())
