"""`python -m benchmarks memory`: what it prints and refuses; real processes play in tests/benchmarks/processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.command import main
from benchmarks.commands import memory
from benchmarks.footprint.figures import MIB, Footprint, PeerFootprint, SizeFigures
from benchmarks.footprint.play import FootprintPlan


def size_of(parameters: int) -> SizeFigures:
    """A peer that holds 9 bytes for each parameter and 160 MiB beyond training."""
    alone = Footprint(peak=300 * MIB + 16 * parameters, steady=280 * MIB + 14 * parameters)
    peer = Footprint(peak=alone.peak + 9 * parameters + 100 * MIB, steady=alone.steady + 8 * parameters + 100 * MIB)
    held = PeerFootprint(peer=peer, daemon=Footprint(peak=60 * MIB, steady=60 * MIB))
    small = PeerFootprint(peer=alone, daemon=Footprint(peak=MIB, steady=MIB))
    return SizeFigures(
        parameters=parameters, alone=alone, peers=(small, held), num_rounds=6, num_entries=192, results_equal=True
    )


SIZES = (size_of(10_000_000), size_of(50_000_000))


def test_each_size_has_a_line_and_all_of_them_one_through_them() -> None:
    lines = memory.memory_lines(SIZES, 4)
    assert lines[0].startswith("4 peers; resident MiB")
    assert lines[2].split() == "10,000,000 453 638 60 246 286 236 equal, 192 entries of 6 rounds".split()
    assert "at the peak: 9.00 bytes per parameter and 168 MB beyond training" in lines
    assert "on average: 8.00 bytes per parameter and 168 MB beyond training" in lines
    assert lines[-1] == "goal: 10.00 bytes per parameter and 200 MB beyond training"


def test_of_one_size_there_is_no_line_and_who_differs_is_told() -> None:
    lines = memory.memory_lines([replace(SIZES[0], results_equal=False)], 4)
    assert "DIFFER" in lines[2]
    assert len(lines) == 4


def test_the_command_plays_what_was_asked_for_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[FootprintPlan] = []

    def play(plan: FootprintPlan, show: object) -> tuple[SizeFigures, ...]:
        asked.append(plan)
        return SIZES

    monkeypatch.setattr(memory, "measure_footprints", play)
    monkeypatch.setattr("sys.platform", "linux")
    file = tmp_path / "figures.json"
    assert main(["memory", "--peers", "3", "--parameters", "10M,50M", "--json", str(file)]) == 0
    assert asked == [FootprintPlan(num_peers=3, parameters=(10_000_000, 50_000_000))]
    document = json.loads(file.read_text())
    assert document["slope_bytes_per_parameter"] == pytest.approx(9.0)
    assert document["command"] == "memory --peers 3 --parameters 10M,50M"
    assert document["machine"]["cores"] >= 1
    assert "bytes per parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--peers", "1"], "--peers is 1; expected 2 to 16"),
        (["--peers", "17"], "--peers is 17; expected 2 to 16"),
        (["--parameters", "10M,5"], "--parameters is '5'"),
        (["--parameters", "12B"], "--parameters names 12000000000; expected 100,000 to 1,000,000,000"),
        (["--json", "nowhere/figures.json"], "nowhere"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_without_proc_there_is_nothing_to_measure_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["memory"]) == 2
    assert "run it on Linux" in " ".join(capsys.readouterr().err.split())
