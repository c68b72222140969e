"""How large an experiment is, and the rows that most have: p2p_diloco as a manifest has it, and what others do.

Rates and momenta of all, ours and others', were chosen by `rate` and `tune` in the micro model and looked at once more
in the tiny one (docs/lab-log.md): trials of this length like little outer momentum with AdamW inside, whoever makes
them, and some with Muon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from p2p_diloco.planning.estimate import STEPS_OF_A_ROUND, WANTED_FRAGMENTS
from p2p_diloco.training.inner_loop import OptimizerName
from research.setting import OURS, Setting

RATES: dict[OptimizerName, dict[str, float]] = {
    "adamw": {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3, "base": 4e-4},
    "muon": {"micro": 1.6e-2, "tiny": 8e-3, "small": 4e-3, "base": 4e-3},
}
"""Inner rates: `rate` chose those of micro and tiny, from data-parallel as from islands. In small with Muon it is the
best of three of data-parallel, of two of islands (docs/lab-log.md). Nobody has tuned base, nor small with AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How large an experiment is.

    Attributes:
        size: of the model.
        islands: learners.
        ticks: inner steps of an island.
        sync_every: H.
        optimizer: of the inner steps of all rows.
        inner_rate: of all rows; None: what suits the size and the optimiser.
        windows: of all islands together in a step, so that more islands do not mean more tokens.
        seeds: trials of each row; None: as many as the experiment wants.
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

    def ours(self, **changes: object) -> Setting:
        """Return p2p_diloco as a manifest has it by default."""
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
        )
        return replace(_tuned(base), **changes)  # type: ignore[arg-type]

    def rate_of(self, optimizer: OptimizerName) -> float:
        """Return the inner rate of rows with such inner steps."""
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
"""Outer rate and momentum of each: theirs as `tune` found them with either inside, ours as docs/decisions/0022 says."""
OUTER_OFTEN: dict[OptimizerName, dict[str, tuple[float, float]]] = {
    "adamw": {},
    "muon": {
        "textbook-diloco": (0.7, 0.5),
        "streaming-diloco": (1.0, 0.7),
        "decoupled-diloco-int4": (0.5, 0.5),
    },
}
"""The same in cycles of eight steps, found by hand (docs/lab-log.md)."""
OUTER_SHORTEST: dict[OptimizerName, dict[str, tuple[float, float]]] = {
    "adamw": {OURS: (0.7, 0.3)},
    "muon": {OURS: (1.0, 0.0), "decoupled-diloco-int4": (1.0, 0.0)},
}
"""And in cycles of four steps, where neither wants momentum. What a manifest has by default, 0.7 and 0.3, costs ours
0.1 to 0.6 % there (docs/lab-log.md)."""
DELAYED = 16
"""What part of a cycle an entry is late, at least a step, in all rows that go on meanwhile. Real processes on one
machine have theirs a step late, in rounds of three steps as of seven (docs/lab-log.md)."""
OFTEN = 4
"""How much more often p2p_diloco exchanges for about half of the bytes that textbook DiLoCo sends."""


def often(scope: Scope) -> tuple[Setting, ...]:
    """Return p2p_diloco with a cycle of a fourth: its bits are an eighth; none where that is not in eights of steps.

    In as many fragments as `plan` would give it. And with a cycle of half of that where it is the shortest round that
    real islands keep to.
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
    """Return what others do in cycles as short as ours; their delays stay the shares of a cycle that they are.

    A share of eight steps is one step, in rounds of two, and of four in rounds of one: shorter than real islands keep
    to, which is kind to them. In the shortest cycles only who was best in those of eight steps.
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
    """Return all that others do, with figures tuned for them."""
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
