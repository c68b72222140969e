"""`python -m benchmarks state`: what it prints and refuses; real processes play in tests/benchmarks/processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.averaging.figures import MIB
from benchmarks.command import main
from benchmarks.commands import state
from benchmarks.state.transfer import Transfer, TransferPlan

ONE = Transfer(
    seconds=0.5,
    installed_seconds=0.4,
    cpu_seconds=0.8,
    daemon_cpu_seconds=0.4,
    received_bytes=101_000_000,
    peak_joiner_bytes=1000 * MIB,
    peak_donor_bytes=1100 * MIB,
    late_seconds=(0.001, 0.02),
    is_equal=True,
)


def played(monkeypatch: pytest.MonkeyPatch, *transfers: Transfer) -> list[TransferPlan]:
    plans: list[TransferPlan] = []

    def measure(plan: TransferPlan, show: object) -> list[Transfer]:
        plans.append(plan)
        return list(transfers)

    monkeypatch.setattr(state, "measure_transfers", measure)
    monkeypatch.setattr("sys.platform", "linux")
    return plans


def test_the_command_plays_what_was_asked_for_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = played(monkeypatch, ONE)
    file = tmp_path / "figures.json"
    words = ["--megabytes", "100", "--donors", "4", "--killed", "2", "--repeat", "1", "--json", str(file)]
    assert main(["state", *words]) == 0
    assert plans == [TransferPlan(megabytes=100, donors=4, killed=2, repeats=1)]
    document = json.loads(file.read_text())
    assert document["megabytes_per_second"] == 200.0
    assert document["command"] == "state --megabytes 100 --donors 4 --killed 2 --repeat 1"
    assert document["machine"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert "100 MB of state from 4 donors, 2 killed half-way" in printed
    assert "200 (200–200)" in printed
    assert printed.rstrip().endswith("equal")


def test_who_ends_with_other_bytes_is_told_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, ONE, replace(ONE, is_equal=False))
    assert main(["state"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("DIFFER")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--donors", "0"], "--donors is 0; expected 1 to 16"),
        (["--donors", "2", "--killed", "2"], "--killed is 2; expected 0 to 1, so that one donor survives"),
        (["--killed", "-1"], "--killed is -1"),
        (["--megabytes", "0"], "--megabytes is 0"),
        (["--repeat", "0"], "--repeat is 0; expected at least 1"),
        (["--json", "nowhere/figures.json"], "nowhere"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_without_proc_there_is_nothing_to_measure_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["state"]) == 2
    assert "run it on Linux" in " ".join(capsys.readouterr().err.split())
