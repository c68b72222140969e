"""`python -m benchmarks`."""

from __future__ import annotations

import json

import pytest

from benchmarks.command import main
from benchmarks.commands import vectors
from benchmarks.interleaved import Spread
from benchmarks.vectors import StepFigures


def test_vectors_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", "--repeat", "1", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["codec"], figures["parameters"], figures["repeats"]) == ("int4", 1_000_000, 1)
    assert figures["command"] == "vectors --codec int4 --parameters 1M --repeat 1"
    assert figures["machine"]["cores"] >= 1
    assert figures["cycle"]["compiled"] == pytest.approx(
        sum(step["share"] * step["compiled"]["middle"] for step in figures["steps"])
    )


def test_a_table_says_ratios_first_and_what_a_cycle_is_made_of() -> None:
    def step(name: str, share: float, compiled: float, numpy: float) -> StepFigures:
        spreads = [Spread(middle=value, low=value, high=value) for value in (compiled, numpy)]
        return StepFigures(name=name, share=share, compiled=spreads[0], numpy=spreads[1])

    lines = vectors.vectors_lines(
        "int4", [step("encode", 1.0, 2.0, 6.0), step("mean", 0.25, 4.0, 8.0), step("x", 0, 9, 9)]
    )
    assert "3.0x    2.00" in lines[2]
    assert lines[4].endswith("not in the sum")
    assert "2.7x    3.00" in lines[5]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--parameters", "5"], "--parameters is '5'"),
        (["--repeat", "0"], "--repeat is 0; expected at least 1"),
        (["--codec", "int5"], "--codec is 'int5'; expected one of float32, bfloat16, int8, int4"),
        (["--json", "nowhere/figures.json"], "nowhere"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
