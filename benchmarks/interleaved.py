"""Interleaved measurements: candidates run in turn, repeatedly, so that noise on the machine affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Spread of repeated measurements of one quantity.

    Attributes:
        middle: the median.
        low, high: the quartiles; with fewer than four measurements, the minimum and the maximum.
    """

    middle: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of at least one value."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return Spread(middle=median(ordered), low=ordered[quarter], high=ordered[-1 - quarter])


def measure_in_turn(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, seconds: Callable[[], float]
) -> dict[str, Spread]:
    """Run each candidate `repeats` times, in turn, after one unmeasured run.

    Args:
        seconds: clock to measure with, such as `time.process_time`.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, run in candidates.items():
            began = seconds()
            run()
            if repeat:
                taken[name].append(seconds() - began)
    return {name: spread_of(values) for name, values in taken.items()}
