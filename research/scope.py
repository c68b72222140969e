"""Scale of an experiment, and its common rows: p2p_diloco with a manifest's defaults, and other systems.

Rates and momenta of all systems were chosen on exploring seeds with the micro model and checked with the tiny one
(docs/lab-log.md). In trials of this length, all systems do best with little outer momentum with AdamW as inner
optimiser, and with some momentum with Muon. Rows of evidence have values of their own (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from p2p_diloco.planning.estimate import STEPS_OF_A_ROUND, WANTED_FRAGMENTS
from p2p_diloco.training.inner_loop import OptimizerName, Schedule
from research.setting import OURS, Setting
from research.stages import JUDGED_TOKENS, Stage

RATES: dict[OptimizerName, dict[str, float]] = {
    "adamw": {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3, "base": 4e-4},
    "muon": {"micro": 1.6e-2, "tiny": 8e-3, "small": 4e-3, "base": 4e-3},
}
"""Inner learning rates. `rate` chose those of micro and tiny, with the same result for data-parallel and islands. The
rate of small with Muon is the best of three for data-parallel and of two for islands (docs/lab-log.md). Those of base,
and of small with AdamW, are not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Scale of an experiment.

    Attributes:
        size: size of the model.
        islands: number of learners.
        ticks: inner steps of an island.
        sync_every: ticks of a cycle, H.
        optimizer: inner optimiser of all rows.
        inner_rate: inner learning rate of all rows; None: tuned for the size and the optimiser.
        windows: windows per step of all islands together, so that more islands do not mean more tokens.
        seeds: trials of each row; None: the experiment's default.
        stage: stage of evidence, see research/stages.py.
        inner_schedule: schedule of the inner rate of all rows.
        is_quick: few seeds and rows.
    """

    size: str = "tiny"
    islands: int = 4
    ticks: int = 480
    sync_every: int = 32
    optimizer: OptimizerName = "muon"
    inner_rate: float | None = None
    windows: int = 16
    seeds: int | None = None
    is_quick: bool = False
    stage: Stage = "explore"
    inner_schedule: Schedule = "cosine"

    def ours(self, **changes: object) -> Setting:
        """Return p2p_diloco with the default settings of a manifest."""
        base = Setting(
            name=OURS,
            size=self.size,
            islands=self.islands,
            ticks=self.ticks,
            sync_every=self.sync_every,
            delay=max(1, self.sync_every // DELAYED),
            batch=max(1, self.windows // self.islands),
            inner=self.optimizer,
            learning_rate=self.rate_of(self.optimizer),
            mean="radial",
            stage=self.stage,
            judged_tokens=JUDGED_TOKENS[self.stage],
            inner_schedule=self.inner_schedule,
        )
        return replace(_tuned(base), **changes)  # type: ignore[arg-type]

    def rate_of(self, optimizer: OptimizerName) -> float:
        """Return the inner learning rate for an inner optimiser."""
        if self.inner_rate is not None:
            return self.inner_rate
        return RATES[optimizer][self.size]


OUTER: dict[OptimizerName, dict[str, tuple[float, float]]] = {
    "adamw": {
        OURS: (0.7, 0.3),
        "textbook-diloco": (1.0, 0.0),
        "streaming-diloco": (0.7, 0.3),
        "decoupled-diloco": (0.5, 0.3),
        "decoupled-diloco-int4": (0.5, 0.3),
        "noloco": (0.7, 0.3),
        "delta-only-groups": (1.0, 0.0),
        "opendiloco": (1.0, 0.0),
    },
    "muon": {
        OURS: (0.7, 0.3),
        "textbook-diloco": (1.0, 0.3),
        "streaming-diloco": (1.0, 0.7),
        "decoupled-diloco": (0.5, 0.5),
        "decoupled-diloco-int4": (0.5, 0.5),
        "noloco": (1.0, 0.3),
        "delta-only-groups": (1.0, 0.3),
        "opendiloco": (1.0, 0.3),
    },
}
"""Outer rate and momentum by inner optimiser and system; ours from docs/decisions/0022, the others from
an earlier search (docs/lab-log.md)."""
OUTER_OFTEN: dict[OptimizerName, dict[str, tuple[float, float]]] = {
    "adamw": {},
    "muon": {
        "textbook-diloco": (0.7, 0.5),
        "streaming-diloco": (1.0, 0.7),
        "decoupled-diloco-int4": (0.5, 0.5),
    },
}
"""Outer rate and momentum in cycles of eight steps, tuned by hand (docs/lab-log.md)."""
OUTER_SHORTEST: dict[OptimizerName, dict[str, tuple[float, float]]] = {
    "adamw": {OURS: (0.7, 0.3)},
    "muon": {OURS: (1.0, 0.0), "decoupled-diloco-int4": (1.0, 0.0)},
}
"""Outer rate and momentum in cycles of four steps, where both systems do best without momentum. The defaults of a
manifest, 0.7 and 0.3, cost p2p_diloco 0.1 to 0.6 % there (docs/lab-log.md)."""
DELAYED = 16
"""Ratio of a cycle to the delay of an entry, which is at least one step, in all rows that train meanwhile. Entries of
real processes on one machine are a step late, both in rounds of three steps and of seven (docs/lab-log.md)."""
OFTEN = 4
"""Factor by which p2p_diloco can exchange more often and still send about half of the bytes of textbook DiLoCo."""


def often(scope: Scope) -> tuple[Setting, ...]:
    """Return p2p_diloco with a quarter of the cycle, as its bits are an eighth; none if 8 does not divide it.

    The number of fragments is what `plan` recommends. If half of that cycle is the shortest round that real islands can
    keep, a row with that half is added.
    """
    steps = _short_cycle(scope)
    rows = (_in_short_rounds(scope, steps),) if steps else ()
    if steps != 2 * STEPS_OF_A_ROUND:
        return rows
    return (*rows, _with_pair(_in_short_rounds(scope, STEPS_OF_A_ROUND), OUTER_SHORTEST[scope.optimizer][OURS]))


def _in_short_rounds(scope: Scope, steps: int) -> Setting:
    row = replace(scope, sync_every=steps).ours(name=f"{OURS}-every-{steps}")
    return replace(row, fragments=min(WANTED_FRAGMENTS, steps // STEPS_OF_A_ROUND))


def others_often(scope: Scope) -> tuple[Setting, ...]:
    """Return the other systems in cycles as short as ours, with delays that stay the same share of a cycle.

    In eight steps this share is one step, in rounds of two steps; in four steps, in rounds of one. Such rounds are
    shorter than real islands can keep, which favours these systems. The shortest cycles include only the system that
    was best in cycles of eight steps.
    """
    steps = _short_cycle(scope)
    rows = _others_every(scope, steps, OUTER_OFTEN) if steps else ()
    if steps != 2 * STEPS_OF_A_ROUND:
        return rows
    return (*rows, *_others_every(scope, STEPS_OF_A_ROUND, OUTER_SHORTEST))


def _others_every(
    scope: Scope, steps: int, tuned: Mapping[OptimizerName, Mapping[str, tuple[float, float]]]
) -> tuple[Setting, ...]:
    rows, pairs = baselines(replace(scope, sync_every=steps)), tuned[scope.optimizer]
    return tuple(
        _with_pair(replace(row, name=f"{row.name}-every-{steps}"), pairs[row.system])
        for row in rows
        if row.system in pairs
    )


def _with_pair(setting: Setting, pair: tuple[float, float]) -> Setting:
    return replace(setting, outer_rate=pair[0], momentum=pair[1])


def _short_cycle(scope: Scope) -> int:
    steps = scope.sync_every // OFTEN
    return 0 if steps % 8 else steps


def baselines(scope: Scope) -> tuple[Setting, ...]:
    """Return the other systems, each with tuned settings."""
    plain = scope.ours(delay=0, fragments=1, weights_by_tokens=False, mean="plain")
    parted = replace(plain, fragments=4)
    decoupled = replace(
        parted, delay=scope.ours().delay, is_radial=True, weights_by_tokens=True, system="decoupled-diloco"
    )
    rows = (
        replace(plain, system="data-parallel"),
        replace(plain, system="textbook-diloco"),
        replace(parted, system="streaming-diloco", delay=scope.ours().delay, alpha=0.5),
        decoupled,
        replace(decoupled, system="decoupled-diloco-int4"),
        replace(plain, system="noloco"),
        replace(plain, system="delta-only-groups"),
        replace(plain, system="opendiloco"),
    )
    return tuple(_tuned(replace(row, name=row.system)) for row in rows)


def _tuned(setting: Setting) -> Setting:
    return _with_pair(setting, OUTER[setting.inner].get(setting.system, (1.0, 0.0)))
