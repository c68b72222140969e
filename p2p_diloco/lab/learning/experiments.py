"""The questions that the bench answers by name, each a table of settings that differ in one thing.

Rates and momenta of all, ours and others', were chosen by `rate` and `tune` in the micro model and looked at once more
in the tiny one (docs/lab-log.md): trials of this length like little outer momentum, whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from p2p_diloco.errors import ConfigError
from p2p_diloco.island.inner_loop import OptimizerName
from p2p_diloco.lab.learning.setting import OURS, Setting

RATES = {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3, "base": 4e-4}
"""Inner rates of AdamW; `rate` chose those of micro and tiny, from data-parallel as from islands (docs/lab-log.md)."""
POINTS = 12
"""Of the curves of `parity`."""
MUON_FACTOR = 2.0
"""Muon's rate over AdamW's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A table.

    Attributes:
        question: for people, one line.
        settings: one per row; the first is what the others are compared with.
        seeds: trials of each row.
    """

    question: str
    settings: tuple[Setting, ...]
    seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How large an experiment is.

    Attributes:
        size: of the model.
        islands: learners.
        ticks: inner steps of an island.
        sync_every: H.
        optimizer: of the inner steps of all rows.
        windows: of all islands together in a step, so that more islands do not mean more tokens.
        seeds: trials of each row; None: as many as the experiment wants.
        is_quick: few seeds and rows.
    """

    size: str = "tiny"
    islands: int = 4
    ticks: int = 480
    sync_every: int = 32
    optimizer: OptimizerName = "adamw"
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
            delay=4,
            batch=max(1, self.windows // self.islands),
            inner=self.optimizer,
            learning_rate=RATES[self.size] * (MUON_FACTOR if self.optimizer == "muon" else 1.0),
        )
        return replace(_tuned(base), **changes)  # type: ignore[arg-type]


OUTER = {
    OURS: (0.7, 0.3),
    "textbook-diloco": (1.0, 0.0),
    "streaming-diloco": (0.7, 0.3),
    "decoupled-diloco": (0.5, 0.3),
    "noloco": (0.7, 0.3),
    "delta-only-groups": (1.0, 0.0),
    "opendiloco": (1.0, 0.0),
}
"""Outer rate and momentum of each, as `tune` found them."""


def baselines(scope: Scope) -> tuple[Setting, ...]:
    """Return all that others do, with figures tuned for them."""
    plain = scope.ours(delay=0, fragments=1, weights_by_tokens=False)
    parted = replace(plain, fragments=4)
    rows = (
        replace(plain, system="data-parallel"),
        replace(plain, system="textbook-diloco"),
        replace(parted, system="streaming-diloco", delay=4, alpha=0.5),
        replace(parted, system="decoupled-diloco", delay=2, is_radial=True, weights_by_tokens=True),
        replace(plain, system="noloco"),
        replace(plain, system="delta-only-groups"),
        replace(plain, system="opendiloco"),
    )
    return tuple(_tuned(replace(row, name=row.system)) for row in rows)


def _tuned(setting: Setting) -> Setting:
    rate, momentum = OUTER.get(setting.system, (1.0, 0.0))
    return replace(setting, outer_rate=rate, momentum=momentum)


def _parity(scope: Scope) -> Experiment:
    return Experiment(
        question="does it learn as well as one machine, and as well as what others do?",
        settings=tuple(replace(setting, points=POINTS) for setting in (scope.ours(), *baselines(scope))),
        seeds=8,
    )


def _mixed(scope: Scope) -> Experiment:
    even = scope.ours()
    mixed = replace(even, slow=scope.islands // 2)
    return Experiment(
        question="what does it cost when half of the islands are four times slower, at equal tokens?",
        settings=(
            replace(mixed.with_tokens_of_all(), name="half-slow"),
            replace(even, name="all-fast"),
            replace(mixed.with_tokens_of_all(), name="half-slow-equal-weights", weights_by_tokens=False),
        ),
        seeds=8,
    )


def _loss(scope: Scope) -> Experiment:
    shares = (0.25, 0.5)
    lossy = [scope.ours(name=f"{round(100 * share)}%-lost", lost_share=share) for share in shares]
    kept = scope.ours(name="25%-lost-late-keep", lost_share=0.25, late="keep")
    return Experiment(
        question="what does it cost when contributions are lost?",
        settings=(lossy[0], scope.ours(name="none-lost"), lossy[1], kept),
        seeds=8,
    )


def _bits(scope: Scope) -> Experiment:
    plain = scope.ours(name="float32", contribution="float32", entry="float32")
    return Experiment(
        question="how few bits lose nothing?",
        settings=(
            scope.ours(name="int4"),
            plain,
            replace(plain, name="int8", contribution="int8", entry="int8"),
            replace(plain, name="int4-up-float32-down", contribution="int4"),
            scope.ours(name="int4-residual-dropped", merge="overwrite"),
        ),
        seeds=8,
    )


def _outer(scope: Scope) -> Experiment:
    pairs = ((1.0, 0.5), (0.7, 0.5), (1.0, 0.3), (0.7, 0.7), (0.7, 0.9), (1.0, 0.7), (1.3, 0.3), (1.0, 0.0))
    return Experiment(
        question="which outer rate and momentum?",
        settings=tuple(
            scope.ours(name=f"rate-{rate}-momentum-{momentum}", outer_rate=rate, momentum=momentum)
            for rate, momentum in pairs
        ),
        seeds=2,
    )


def _merge(scope: Scope) -> Experiment:
    delays = (0, 4, 16)
    rules = (("keep", 0.0), ("overwrite", 0.0), ("blend", 0.5))
    return Experiment(
        question="how should local parameters follow an entry, the later it comes?",
        settings=tuple(
            scope.ours(name=f"{kind}-delay-{delay}", merge=kind, alpha=alpha, delay=delay)
            for delay in delays
            for kind, alpha in rules
        ),
        seeds=2,
    )


def _radial(scope: Scope) -> Experiment:
    return Experiment(
        question="plain or radial mean?",
        settings=tuple(
            scope.ours(name=f"{kind}-rate-{rate}", is_radial=kind == "radial", outer_rate=rate)
            for kind in ("plain", "radial")
            for rate in (1.0, 0.7, 0.5)
        ),
        seeds=2,
    )


def _sync(scope: Scope) -> Experiment:
    return Experiment(
        question="how often should islands exchange?",
        settings=tuple(
            scope.ours(name=f"every-{steps}", sync_every=steps, delay=steps // 8)
            for steps in (32, 8, 16, 64, 128)
            if steps <= scope.ticks
        ),
        seeds=2,
    )


def _fragments(scope: Scope) -> Experiment:
    return Experiment(
        question="in how many parts?",
        settings=tuple(scope.ours(name=f"{parts}-fragments", fragments=parts) for parts in (4, 1, 2, 8)),
        seeds=2,
    )


def _rate(scope: Scope) -> Experiment:
    rates = tuple(scope.ours().learning_rate * factor for factor in (1.0, 0.25, 0.5, 2.0, 4.0))
    systems = (scope.ours(), *baselines(scope)[:2])
    return Experiment(
        question="which inner rate suits whom?",
        settings=tuple(
            replace(setting, name=f"{setting.name}-{rate:g}", learning_rate=rate)
            for rate in rates
            for setting in systems
        ),
        seeds=1,
    )


_CANDIDATES = {
    OURS: ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5), (0.7, 0.5)),
    "textbook-diloco": ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5), (0.7, 0.3), (0.7, 0.5), (0.7, 0.9)),
    "streaming-diloco": ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5), (0.7, 0.5), (0.4, 0.9)),
    "decoupled-diloco": ((0.7, 0.0), (0.7, 0.3), (0.5, 0.3), (0.5, 0.5), (1.0, 0.0), (0.7, 0.9)),
    "noloco": ((1.0, 0.0), (1.0, 0.3), (0.7, 0.3), (0.7, 0.5)),
    "delta-only-groups": ((1.0, 0.0), (1.0, 0.3), (0.7, 0.5)),
}
"""Outer rate and momentum to choose from, for each algorithm that has them (opendiloco is textbook in float16)."""


def _tune(scope: Scope) -> Experiment:
    systems = {setting.name: setting for setting in (scope.ours(), *baselines(scope))}
    return Experiment(
        question="which outer rate and momentum suits whom?",
        settings=tuple(
            replace(systems[system], name=f"{system}-{rate}-{momentum}", outer_rate=rate, momentum=momentum)
            for system, pairs in _CANDIDATES.items()
            for rate, momentum in pairs
        ),
        seeds=2,
    )


def _topics(scope: Scope) -> Experiment:
    return Experiment(
        question="what does it cost when each island has text of its own kind?",
        settings=(
            scope.ours(name="by-topic", by_topic=True),
            scope.ours(name="mixed-text"),
            replace(baselines(scope)[1], name="textbook-by-topic", by_topic=True),
        ),
        seeds=4,
    )


EXPERIMENTS: dict[str, Callable[[Scope], Experiment]] = {
    "parity": _parity,
    "mixed": _mixed,
    "loss": _loss,
    "bits": _bits,
    "outer": _outer,
    "merge": _merge,
    "radial": _radial,
    "sync": _sync,
    "fragments": _fragments,
    "rate": _rate,
    "tune": _tune,
    "topics": _topics,
}


def experiment_named(name: str, scope: Scope) -> Experiment:
    """Return an experiment.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is called {name!r}; known are {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name](scope)
    if scope.seeds is not None:
        return replace(experiment, seeds=scope.seeds)
    return replace(experiment, seeds=min(2, experiment.seeds)) if scope.is_quick else experiment
