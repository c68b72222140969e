"""Candidates take turns, and the first turn of each does not count."""

from __future__ import annotations

import pytest

from benchmarks.interleaved import measure_in_turn, spread_of


@pytest.mark.parametrize(
    ("values", "spread"),
    [([3.0], (3.0, 3.0, 3.0)), ([3.0, 1.0], (2.0, 1.0, 3.0)), ([5.0, 1.0, 4.0, 2.0, 3.0], (3.0, 2.0, 4.0))],
)
def test_a_spread_is_median_and_quartiles(values: list[float], spread: tuple[float, float, float]) -> None:
    found = spread_of(values)
    assert (found.middle, found.low, found.high) == spread


def test_candidates_take_turns_and_the_first_does_not_count() -> None:
    turns: list[str] = []
    clock = 0.0

    def run(name: str, seconds: float) -> None:
        nonlocal clock
        clock += 100.0 if name not in turns else seconds
        turns.append(name)

    candidates = {"fast": lambda: run("fast", 1.0), "slow": lambda: run("slow", 4.0)}
    taken = measure_in_turn(candidates, repeats=3, seconds=lambda: clock)
    assert turns == ["fast", "slow"] * 4
    assert (taken["fast"].middle, taken["slow"].high) == (1.0, 4.0)
