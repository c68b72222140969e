"""The rows of the goodput table, and the measured costs that they rest on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commands.goodput import KEPT_COSTS
from benchmarks.goodput.figures import (
    EXTRAPOLATED,
    FITTED,
    MEASURED,
    PREDICTED,
    KeptCost,
    cost_at,
    goodput_document,
    goodput_lines,
    read_costs,
)
from benchmarks.goodput.model import DILOCO, OURS, OURS_AS_CLAIMED
from p2p_diloco.errors import StateError

SMALL = KeptCost(islands=4, further_seconds=20.0, carried_seconds=8.0)
LARGE = KeptCost(islands=16, further_seconds=30.0, carried_seconds=12.0)


@pytest.mark.parametrize(
    ("islands", "cost", "basis"),
    [
        (2, SMALL, EXTRAPOLATED),
        (4, SMALL, MEASURED),
        (8, SMALL, EXTRAPOLATED),
        (16, LARGE, MEASURED),
        (1024, LARGE, EXTRAPOLATED),
    ],
)
def test_the_cost_is_that_of_the_nearest_smaller_swarm(islands: int, cost: KeptCost, basis: str) -> None:
    assert cost_at([SMALL, LARGE], islands) == (cost, basis)


def test_rows_of_all_systems() -> None:
    figures = goodput_document([SMALL, LARGE])
    assert (figures["num_constants"], figures["num_fitted_points"]) == (3, 5)
    rows = figures["rows"]
    assert {"system", "elastic", "islands", "chips", "goodput", "published"} <= rows[0].keys()
    assert [row["basis"] for row in rows if row["published"] is not None] == [FITTED] * 5 + [PREDICTED] * 4
    by = {(row["system"], row["chips"], row["islands"]): row for row in rows if row["elastic"]}
    assert len(by) == len([row for row in rows if row["elastic"]]), "no setting has two rows"
    for chips in (1_200_000, 2_400_000):
        for islands in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            claimed, ours, theirs = (by[name, chips, islands]["goodput"] for name in (OURS_AS_CLAIMED, OURS, DILOCO))
            assert claimed <= ours <= theirs
    # 16 islands of 75,000 chips fail every 420.48 s, and stand for 18.08 s; 18 to 30 s are lost besides.
    assert by[OURS_AS_CLAIMED, 1_200_000, 16]["goodput"] == pytest.approx(
        0.9611 * (1 - 30 / 420.48) / (1 + 18.08 / 420.48), abs=2e-4
    )
    assert by[OURS, 1_200_000, 16]["goodput"] == pytest.approx(
        0.9611 * (1 - 18 / 420.48) / (1 + 18.08 / 420.48), abs=2e-4
    )


def test_printed_tables_have_all_published_points_and_sizes() -> None:
    lines = goodput_lines(goodput_document([SMALL, LARGE]))
    assert lines[0].startswith("3 constants fitted to 5 published points: a failure stops a rigid unit for 71 s and")
    assert sum(line.endswith((FITTED, PREDICTED)) for line in lines) == 9
    assert sum(line.endswith((MEASURED, EXTRAPOLATED)) for line in lines) == 22


def test_kept_costs_are_read_smallest_first(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    rows = [{"islands": n, "lost_seconds": 10.0 + n, "skipped_cycles": 0.25} for n in (8, 2)]
    path.write_text(json.dumps({"pause_seconds": 7.0, "cycle_seconds": 4.0, "rows": rows}), encoding="utf-8")
    assert read_costs(path) == (
        KeptCost(islands=2, further_seconds=5.0, carried_seconds=1.0),
        KeptCost(islands=8, further_seconds=11.0, carried_seconds=7.0),
    )


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"pause_seconds": 1, "cycle_seconds": 1, "rows": []}', '{"rows": [{}]}']
)
def test_a_file_without_costs_is_refused_with_the_command_that_measures_them(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(
        StateError, match=r"costs\.json.*measure it with python -m benchmarks failures --json costs\.json"
    ):
        read_costs(path)


def test_what_the_repository_keeps_can_be_read() -> None:
    assert read_costs(KEPT_COSTS)
