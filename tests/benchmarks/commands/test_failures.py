"""`python -m benchmarks failures`: what it prints and refuses."""

from __future__ import annotations

import json

import pytest

from benchmarks.command import main
from benchmarks.commands import failures
from benchmarks.goodput.failures import FailureCost, FailurePlan, Measured

PLANS: list[FailurePlan] = []


def measured(plan: FailurePlan) -> Measured:
    """Return made-up figures: two failures, after one of which the island was not included again."""
    PLANS.append(plan)
    costs = tuple(
        FailureCost(lost_seconds=lost, others_seconds=12.0, skipped_cycles=0.5, stalled_rounds=1, rejoin_rounds=rounds)
        for lost, rounds in ((40.0, 3), (44.0, None))
    )
    return Measured(islands=plan.islands, costs=costs, sustained_failures=9, sustained_share=0.75)


def test_failures_for_people_and_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "measure_failures", measured)
    PLANS.clear()
    words = ["failures", "--islands", "2, 4", "--repeat", "2", "--cycle-seconds", "20", "--pause-seconds", "10"]
    assert main([*words, "--every-seconds", "50", "--sustained-cycles", "3", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(plan.islands, plan.failures, plan.sustained_cycles) for plan in PLANS] == [(2, 2, 3), (4, 2, 3)]
    assert (figures["cycle_seconds"], figures["pause_seconds"], figures["every_seconds"]) == (20.0, 10.0, 50.0)
    assert [row["lost_seconds"] for row in figures["rows"]] == [42.0, 42.0]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert "4 islands: 42.0 ± 2.0 s lost, 12.0 s of them by others; 0.50 cycles skipped" in printed[2]
    assert "included again after 3.0 rounds (1 of 2 not at all); 9 failures in 24 cycles: 75.0%" in printed[2]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--islands", "4,x"], "--islands is '4,x'; expected numbers from 1 to 256 with commas between them"),
        (["--islands", "257"], "--islands is '257'; expected numbers"),
        (["--repeat", "0"], "--repeat is 0; expected at least 1"),
        (["--sustained-cycles", "0"], "--sustained-cycles is 0; expected at least 1"),
        (["--cycle-seconds", "1"], "--cycle-seconds is 1; expected at least 2"),
        (["--cycle-seconds", "nan"], "--cycle-seconds is nan; expected at least 2"),
        (["--pause-seconds", "73"], "--pause-seconds is 73; expected more than 0, and at most 72, 3 cycles"),
        (["--pause-seconds", "0"], "--pause-seconds is 0; expected more than 0"),
        (["--every-seconds", "0"], "--every-seconds is 0; expected more than 0"),
    ],
)
def test_an_option_without_a_meaning_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["failures", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
