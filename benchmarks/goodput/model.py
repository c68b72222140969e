"""Goodput of large trainings: the share of all chip-seconds whose training counts, in closed form.

A unit is a set of chips that stops as a whole when one of them fails: all chips of a data-parallel training, one
learner, one island. A unit of n chips fails every T/n seconds, where T is the mean time of a chip between failures.
Then all of it stands for some seconds; what fails meanwhile is part of the same pause. By the renewal theorem a unit
trains for the share 1 / (1 + pause n / T) of its time. Units do not wait for each other, so this is also the share of a
training of many equal units. If each failure costs further training besides, that comes off.

Elastic units continue without the chips that failed, which are away until they are repaired. While one failure keeps
`away` chip-seconds out of work, 1 in 1 + away / T chips is there, however many units there are. Units that are not
elastic wait for a repair or a spare, so their pause contains it.

Three constants are fitted to five published points: the two pauses and `away`. Other points follow without a fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SECONDS_PER_YEAR = 365.0 * 86_400.0
CHIP_SECONDS = SECONDS_PER_YEAR
"""T, the mean time of a chip between two failures."""
DATA_PARALLEL, DILOCO, OURS = "data-parallel", "diloco", "p2p_diloco"
OURS_AS_CLAIMED = "p2p_diloco, carried work not counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The fitted constants.

    Attributes:
        rigid_pause_seconds: time that a unit that is not elastic stands for each failure.
        elastic_pause_seconds: time that an elastic unit stands for each failure, to go on with fewer chips and later
            with all.
        away_chip_seconds: chips that a failure takes from an elastic unit, times the seconds until they are back.
    """

    rigid_pause_seconds: float
    elastic_pause_seconds: float
    away_chip_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting.

    Attributes:
        units: learners or islands; 1 for data-parallel.
        published: goodput in the paper; None: not published.
        is_fitted: whether the constants are fitted to it.
    """

    system: str
    elastic: bool
    units: int
    chips: int
    published: float | None = None
    is_fitted: bool = False


def _published(chips: int, shares: Mapping[tuple[str, bool, int], float], *, is_fitted: bool) -> tuple[Point, ...]:
    return tuple(
        Point(system=system, elastic=elastic, units=units, chips=chips, published=share, is_fitted=is_fitted)
        for (system, elastic, units), share in shares.items()
    )


PUBLISHED = (
    *_published(
        1_200_000,
        {
            (DATA_PARALLEL, False, 1): 0.27,
            (DATA_PARALLEL, True, 1): 0.58,
            (DILOCO, True, 2): 0.70,
            (DILOCO, True, 8): 0.88,
            (DILOCO, True, 16): 0.93,
        },
        is_fitted=True,
    ),
    *_published(
        2_400_000,
        {
            (DATA_PARALLEL, False, 1): 0.18,
            (DATA_PARALLEL, True, 1): 0.40,
            (DILOCO, True, 8): 0.80,
            (DILOCO, True, 16): 0.86,
        },
        is_fitted=False,
    ),
)
"""Source: Decoupled DiLoCo, arXiv 2604.21428, figure 5, tables 1 and 11; 27 % is from its announcement. Chips fail once
a year there."""


def share_present(constants: Constants) -> float:
    """Return the share of chips of elastic units that are not away."""
    return 1.0 / (1.0 + constants.away_chip_seconds / CHIP_SECONDS)


def share_trained(unit_chips: float, pause_seconds: float, further_seconds: float = 0.0) -> float:
    """Return the share of its time that a unit trains for good.

    Args:
        pause_seconds: time that it stands for each failure; further failures meanwhile are part of the same pause.
        further_seconds: training lost by each failure besides, the unit's own and that of others.
    """
    failures_per_second = unit_chips / CHIP_SECONDS
    return max(1.0 - further_seconds * failures_per_second, 0.0) / (1.0 + pause_seconds * failures_per_second)


def goodput_of(point: Point, constants: Constants, further_seconds: float = 0.0) -> float:
    """Return the goodput of a setting; see `share_trained`."""
    unit_chips = point.chips / point.units
    if not point.elastic:
        return share_trained(unit_chips, constants.rigid_pause_seconds, further_seconds)
    return share_present(constants) * share_trained(unit_chips, constants.elastic_pause_seconds, further_seconds)


def fit(points: Sequence[Point]) -> Constants:
    """Return the constants by least squares.

    For elastic units 1 / goodput is a straight line in the chips of a unit: (1 + away / T) (1 + pause n / T). An error
    of goodput is one of 1 / goodput times the square of goodput, so each point has its fourth power as weight. For
    units that are not elastic the line begins at 1.
    """
    known = [(point.elastic, point.chips / point.units, point.published) for point in points if point.published]
    elastic = [(chips, share) for is_elastic, chips, share in known if is_elastic]
    rigid = [(chips, share) for is_elastic, chips, share in known if not is_elastic]
    total = sum(share**4 for _, share in elastic)
    mean_chips = sum(share**4 * chips for chips, share in elastic) / total
    mean_inverse = sum(share**4 / share for _, share in elastic) / total
    rise = sum(share**4 * (chips - mean_chips) * (1.0 / share - mean_inverse) for chips, share in elastic)
    slope = rise / sum(share**4 * (chips - mean_chips) ** 2 for chips, share in elastic)
    start = mean_inverse - slope * mean_chips
    rigid_rise = sum(share**4 * chips * (1.0 / share - 1.0) for chips, share in rigid)
    rigid_slope = rigid_rise / sum(share**4 * chips**2 for chips, share in rigid)
    return Constants(
        rigid_pause_seconds=rigid_slope * CHIP_SECONDS,
        elastic_pause_seconds=slope / start * CHIP_SECONDS,
        away_chip_seconds=(start - 1.0) * CHIP_SECONDS,
    )
