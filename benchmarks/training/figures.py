"""Figures of the training benchmark: speed kept, participation, and the use of processor time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.interleaved import Spread, spread_of

OURS, OWN_LOOP, BLOCKING, TORCHFT = "p2p_diloco", "own-loop", "blocking", "torchft"


def steps_within(borders: Sequence[float], begin: float, end: float) -> float:
    """Return the number of inner steps between two times, including the fractions of steps at both ends.

    Counting whole steps would be wrong by one in some dozens, as much as an exchange costs.

    Args:
        borders: end times of the steps, ascending. They should span `begin` to `end`; time outside counts no steps.
    """
    counts = np.arange(len(borders), dtype=np.float64)
    at = np.interp([begin, end], borders, counts)
    return float(at[1] - at[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Processor seconds of one island in a window.

    Attributes:
        training: training thread: inner steps, and at step borders contributing and following entries.
        outer: part of it for contributing and following entries.
        rest: all other threads of the process: event loop, vectors, disk.
        daemon: the libp2p daemon.
    """

    training: float = 0.0
    outer: float = 0.0
    rest: float = 0.0
    daemon: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandWindow:
    """Measurements of one island in a window of time.

    Attributes:
        seconds: length of the window.
        steps: inner steps in it, including fractions.
        included: contributions that entries of the window included, in fractions of a round.
        due: maximum possible value of `included`.
    """

    seconds: float
    steps: float
    included: float = 0.0
    due: float = 0.0
    work: Work = dataclasses.field(default_factory=Work)

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> IslandWindow:
        """Convert the answer of a worker."""
        return cls(**{**answer, "work": Work(**answer["work"])})


Window = tuple[IslandWindow, ...]
"""All islands in the same window of time."""


def steps_per_second(window: Window) -> float:
    """Return inner steps per second, summed over all islands."""
    return sum(island.steps / island.seconds for island in window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A window with the exchange, between two windows without it directly before and after."""

    before: Window
    exchanging: Window
    after: Window

    @property
    def speed_kept(self) -> float:
        """Inner steps per second with the exchange, divided by the mean of those without it before and after."""
        alone = fmean(steps_per_second(window) for window in (self.before, self.after))
        return steps_per_second(self.exchanging) / alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one system with one uplink.

    Attributes:
        cycle_seconds: length of a cycle. torchft's cycle is as many inner steps as one of our islands makes in a cycle.
        transmission_seconds: duration of the exchange of a whole cycle alone; the cycle is four times as long.
        steps_per_cycle: inner steps of an island in a cycle.
    """

    system: str
    uplink: str
    cycle_seconds: float
    transmission_seconds: float
    steps_per_cycle: float
    turns: tuple[Turn, ...]

    @property
    def speed_kept(self) -> Spread:
        """Spread of the speed kept over all turns."""
        return spread_of([turn.speed_kept for turn in self.turns])

    @property
    def participation(self) -> float:
        """Share of contributions, over all rounds and islands, that were included."""
        islands = [island for turn in self.turns for island in turn.exchanging]
        return sum(island.included for island in islands) / sum(island.due for island in islands)

    @property
    def cost(self) -> Cost:
        """Processor time of an exchange per island and cycle: median over all turns."""
        costs = [_cost_of(turn, self.cycle_seconds) for turn in self.turns]
        names = [field.name for field in dataclasses.fields(Cost)]
        return Cost(**{name: median(getattr(cost, name) for cost in costs) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Processor seconds beyond those of the inner steps alone.

    Attributes:
        outer: contributing and following entries, on the training thread.
        slower_steps: slowdown of the inner steps themselves, by caches and the interpreter's lock.
        rest: other threads of the process.
        daemon: the libp2p daemon.
    """

    outer: float
    slower_steps: float
    rest: float
    daemon: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return self.outer + self.slower_steps + self.rest + self.daemon


def _cost_of(turn: Turn, cycle_seconds: float) -> Cost:
    alone = (*turn.before, *turn.after)
    cycles = sum(island.seconds for island in turn.exchanging) / cycle_seconds

    def more(name: str) -> float:
        """Return the processor time per cycle beyond that of windows without the exchange."""
        rate = sum(getattr(island.work, name) for island in alone) / sum(island.seconds for island in alone)
        return float(sum(getattr(island.work, name) - rate * island.seconds for island in turn.exchanging) / cycles)

    per_step = sum(island.work.training for island in alone) / sum(island.steps for island in alone)
    outer = sum(island.work.outer for island in turn.exchanging)
    stepping = sum(island.work.training - per_step * island.steps for island in turn.exchanging)
    return Cost(
        outer=outer / cycles, slower_steps=(stepping - outer) / cycles, rest=more("rest"), daemon=more("daemon")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that all rows share; see `--json`."""

    islands: int
    parameters: int
    model: str
    batch: int
    context: int
    codec: str
    fragments: int
    spans_per_fragment: int
    repeats: int
    machine: Mapping[str, Any]


def processor_left(setting: Setting, row: Row) -> float | None:
    """Return the share of the processor that the exchange leaves if the islands have the machine to themselves.

    Other load on the machine affects this less than speed kept: with a third of a core, islands make a third of the
    steps in a cycle, and the exchange costs the same. None for torchft, whose cost cannot be separated.
    """
    if row.system == TORCHFT:
        return None
    return 1.0 - row.cost.seconds * setting.islands / (float(setting.machine["cores"]) * row.cycle_seconds)


def document_of(setting: Setting, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the document for `--json`: medians under short names, spreads and turns under separate keys."""
    documents = [{**_row_document(row), "processor_left": processor_left(setting, row)} for row in rows]
    return {**dataclasses.asdict(setting), "rows": documents}


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "system": row.system,
        "uplink": row.uplink,
        "speed_kept": row.speed_kept.middle,
        "participation": row.participation,
        "cycle_seconds": row.cycle_seconds,
        "transmission_seconds": row.transmission_seconds,
        "inner_steps_per_cycle": row.steps_per_cycle,
        "inner_steps_per_second_alone": median(steps_per_second(turn.before) for turn in row.turns),
        "cpu_seconds_per_cycle_per_island": dataclasses.asdict(row.cost),
        "spread": {"speed_kept": dataclasses.asdict(row.speed_kept)},
        "turns": [{"speed_kept": turn.speed_kept, **dataclasses.asdict(turn)} for turn in row.turns],
    }
