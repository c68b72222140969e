"""`python -m benchmarks training`: what it prints and refuses; real processes play in tests/benchmarks/processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import main
from benchmarks.commands import training
from benchmarks.training.figures import BLOCKING, OURS, TORCHFT, IslandWindow, Row, Setting, Turn, Work
from benchmarks.training.play import Played, TrainingPlan
from benchmarks.training.uplinks import Uplink
from p2p_diloco.errors import ConfigError

ALONE = IslandWindow(seconds=10.0, steps=100.0, work=Work(training=5.0))
EXCHANGING = IslandWindow(
    seconds=20.0, steps=190.0, included=7.0, due=8.0, work=Work(training=10.0, outer=0.5, rest=0.6, daemon=0.4)
)
ROW = Row(
    system=OURS,
    uplink="20mbit",
    cycle_seconds=10.0,
    transmission_seconds=2.5,
    steps_per_cycle=95.0,
    turns=(Turn(before=(ALONE,), exchanging=(EXCHANGING,), after=(ALONE,)),),
)
PLAYED = Played(
    setting=Setting(
        islands=4,
        parameters=10_000_000,
        model="small",
        batch=1,
        context=64,
        codec="int4",
        fragments=4,
        spans_per_fragment=8,
        repeats=3,
        machine={"cores": 2},
    ),
    rows=(ROW, replace(ROW, system=TORCHFT)),
    failures=("blocking at 20mbit: it fell silent",),
)


def test_speed_kept_comes_first_and_who_failed_is_told() -> None:
    lines = training.training_lines(PLAYED)
    assert lines[0].startswith("4 islands, 10,000,000 parameters, int4, 2 cores, 3 repeats")
    ours = next(line for line in lines if OURS in line)
    assert "95.0% (95.0%–95.0%)" in ours
    assert "87.5%" in ours
    assert ours.endswith("0.75     85.0%")
    assert next(line for line in lines if TORCHFT in line).rstrip().endswith("95.0"), "its CPU time is unknown"
    assert "FAILED: blocking at 20mbit: it fell silent" in lines


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[TrainingPlan]:
    """Play nothing; return what would have been played."""
    seen: list[TrainingPlan] = []

    def play(plan: TrainingPlan, show: Any) -> Played:
        seen.append(plan)
        return PLAYED

    monkeypatch.setattr(training, "play_training", play)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(training, "torchft_interpreter", lambda: "/cache/bin/python")
    return seen


def test_the_command_plays_and_writes_what_came_out(
    plans: list[TrainingPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    assert main(["training", "--json", str(target), "--uplink", "5mbit,unlimited", "--repeat", "2"]) == 0
    document = json.loads(target.read_text())
    assert [row["system"] for row in document["rows"]] == [OURS, TORCHFT]
    assert document["rows"][0]["speed_kept"] == pytest.approx(0.95)
    assert document["command"].startswith("training --islands 4 --uplink 5mbit,unlimited")
    assert document["machine"] == PLAYED.setting.machine
    assert "speed kept" in capsys.readouterr().out
    (plan,) = plans
    assert (plan.shape.fragments, plan.shape.spans_per_fragment) == (1, 4)
    assert plan.uplinks == (Uplink(name="5mbit", bits_per_second=5e6), Uplink(name="unlimited"))
    assert plan.systems == (OURS, BLOCKING, TORCHFT)
    assert plan.torchft_interpreter == "/cache/bin/python"
    assert (plan.repeats, plan.cycle_seconds) == (2, None)


def test_torchft_need_not_be_there_when_it_does_not_play(
    plans: list[TrainingPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise ConfigError("torchft is not installed")

    monkeypatch.setattr(training, "torchft_interpreter", missing)
    assert main(["training", "--against", "blocking", "--cycle-seconds", "8"]) == 0
    assert plans[0].cycle_seconds == 8.0
    assert main(["training"]) == 2
    assert "torchft is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--islands", "1"], "--islands is 1; expected 2 to 16"),
        (["--repeat", "0"], "--repeat is 0; expected at least 1"),
        (["--fragments", "0"], "--fragments is 0; expected at least 1"),
        (["--spans", "3"], "--spans is 3; expected 4 to 2048, one for each island at least"),
        (["--cycle-seconds", "0.1"], "--cycle-seconds is 0.1; expected at least 0.2, or 0"),
        (["--cycle-seconds", "nan"], "--cycle-seconds is nan"),
        (["--codec", "zip"], "--codec is 'zip'"),
        (["--uplink", "fast"], "--uplink is 'fast'"),
        (["--against", "hivemind"], "--against names 'hivemind'"),
        (["--fragments", "5000"], "fragments"),
        (["--json", "/nowhere/figures.json"], "/nowhere"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_starts(
    words: list[str], text: str, plans: list[TrainingPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["training", *words]) == 2
    assert text in capsys.readouterr().err
    assert plans == []


def test_another_system_than_linux_is_refused(
    plans: list[TrainingPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["training"]) == 2
    assert "only Linux has" in capsys.readouterr().err


def test_torchft_is_installed_by_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(training, "install_torchft", lambda show: called.append(True))
    assert main(["install-torchft"]) == 0
    assert called == [True]
