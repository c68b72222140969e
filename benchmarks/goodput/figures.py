"""The documents of both commands, and the rows of the goodput table: published, modelled, and ours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput.model import (
    DILOCO,
    OURS,
    OURS_AS_CLAIMED,
    PUBLISHED,
    Constants,
    Point,
    fit,
    goodput_of,
    share_present,
)
from p2p_diloco.errors import StateError

CHIPS = (1_200_000, 2_400_000)
ISLANDS = tuple(2**power for power in range(11))
"""Sizes of the curves."""
FITTED, PREDICTED, MEASURED, EXTRAPOLATED = "fitted", "predicted", "measured cost", "extrapolated cost"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptCost:
    """The mean cost of a failure in a swarm of some size.

    Attributes:
        further_seconds: island-seconds beyond the pause that no entry names.
        carried_seconds: the part of them that is not lost: contributions of other islands to spans that got no entry.
            They stay in these islands' parameters, and later contributions carry them.
    """

    islands: int
    further_seconds: float
    carried_seconds: float


def read_costs(path: Path) -> tuple[KeptCost, ...]:
    """Return the measured costs of failures, smallest swarm first.

    Raises:
        StateError: the file cannot be read, or was not written by `failures`.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        pause, cycle = float(figures["pause_seconds"]), float(figures["cycle_seconds"])
        costs = [
            KeptCost(
                islands=int(row["islands"]),
                further_seconds=float(row["lost_seconds"]) - pause,
                carried_seconds=float(row["skipped_cycles"]) * (int(row["islands"]) - 1) * cycle,
            )
            for row in figures["rows"]
        ]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise StateError(
            f"cannot read the cost of failures from {path.name} ({error}); measure it with "
            f"python -m benchmarks failures --json {path.name}"
        ) from error
    if not costs:
        raise StateError(f"{path.name} has no rows; measure it with python -m benchmarks failures --json {path.name}")
    return tuple(sorted(costs, key=lambda cost: cost.islands))


def cost_at(costs: Sequence[KeptCost], islands: int) -> tuple[KeptCost, str]:
    """Return the cost of the nearest measured size that is no larger, or the smallest, and what it is based on.

    Larger swarms than measured have the cost of the largest. The other islands lose the spans of one owner until it is
    replaced: 1/N of all spans of N islands.
    """
    found = max((cost for cost in costs if cost.islands <= islands), key=lambda c: c.islands, default=costs[0])
    return found, MEASURED if found.islands == islands else EXTRAPOLATED


def goodput_document(costs: Sequence[KeptCost]) -> dict[str, Any]:
    """Return constants and rows: published settings, then the curves of both systems."""
    constants = fit([point for point in PUBLISHED if point.is_fitted])
    rows = [_row(point, goodput_of(point, constants), FITTED if point.is_fitted else PREDICTED) for point in PUBLISHED]
    for chips in CHIPS:
        for islands in ISLANDS:
            point = Point(system=DILOCO, elastic=True, units=islands, chips=chips)
            if not any((p.system, p.units, p.chips) == (DILOCO, islands, chips) for p in PUBLISHED):
                rows.append(_row(point, goodput_of(point, constants), PREDICTED))
        for system in (OURS, OURS_AS_CLAIMED):
            for islands in ISLANDS:
                cost, basis = cost_at(costs, islands)
                further = cost.further_seconds - (cost.carried_seconds if system == OURS else 0.0)
                point = Point(system=system, elastic=True, units=islands, chips=chips)
                rows.append(_row(point, goodput_of(point, constants, further), basis))
    return {
        "constants": dataclasses.asdict(constants),
        "num_constants": len(dataclasses.fields(constants)),
        "num_fitted_points": sum(point.is_fitted for point in PUBLISHED),
        "share_present": share_present(constants),
        "rows": rows,
    }


def _row(point: Point, goodput: float, basis: str) -> dict[str, Any]:
    return {
        "system": point.system,
        "elastic": point.elastic,
        "islands": point.units,
        "chips": point.chips,
        "goodput": round(goodput, 6),
        "published": point.published,
        "basis": basis,
    }


def goodput_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the printed tables: published settings, then a row for each number of islands."""
    constants = Constants(**figures["constants"])
    lines = [
        f"{figures['num_constants']} constants fitted to {figures['num_fitted_points']} published points: a failure "
        f"stops a rigid unit for {constants.rigid_pause_seconds:.0f} s and an elastic one for "
        f"{constants.elastic_pause_seconds:.0f} s, and keeps {constants.away_chip_seconds:,.0f} chip-seconds away "
        f"({figures['share_present']:.1%} of the chips of elastic units are present)",
        "",
        f"{'':30}{'units':>6}{'chips':>11}  goodput  published",
    ]
    for row in figures["rows"]:
        if row["published"] is not None:
            name = f"{row['system']}, {'elastic' if row['elastic'] else 'not elastic'}"
            shares = f"{row['goodput']:>9.1%}{row['published']:>11.0%}"
            lines.append(f"{name:<30}{row['islands']:>6}{row['chips']:>11,}{shares}  {row['basis']}")
    goodput = {(row["system"], row["chips"], row["islands"]): row["goodput"] for row in figures["rows"]}
    based = {row["islands"]: row["basis"] for row in figures["rows"] if row["system"] == OURS}
    for chips in CHIPS:
        lines += ["", f"{chips:,} chips{DILOCO:>13}{OURS:>13}{'carried not counted':>22}"]
        for islands in ISLANDS:
            columns = "".join(
                f"{goodput[system, chips, islands]:>{width}.1%}"
                for system, width in ((DILOCO, 13), (OURS, 13), (OURS_AS_CLAIMED, 22))
            )
            lines.append(f"{islands:>7} islands{columns}  {based[islands]}")
    return lines
