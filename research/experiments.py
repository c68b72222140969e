"""Named experiments, each a table of settings that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from p2p_diloco.errors import ConfigError
from p2p_diloco.training.inner_loop import OptimizerName
from research.scope import DELAYED, Scope, baselines, often, others_often
from research.setting import CURVE_POINTS, Setting

FEW, MANY = 4, 8
"""Number of seeds: few if the answer is obvious, many if the figures are quoted."""
QUICK_SEEDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment, which results in one table.

    Attributes:
        question: the question that it answers, in one line.
        settings: one per row; the first is compared with the others.
        seeds: number of trials of each row.
        comparisons: number of gaps whose intervals hold together with 95 %; 1: each interval on its own.
        notes: for each tuned row, its tries and values.
    """

    question: str
    settings: tuple[Setting, ...]
    seeds: int
    comparisons: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)

    def only(self, names: Sequence[str]) -> Experiment:
        """Return the experiment with these rows only, in the order of `names`.

        Raises:
            ConfigError: a name is unknown, or there are fewer than two rows.
        """
        rows = {setting.name: setting for setting in self.settings}
        for name in names:
            if name not in rows:
                raise ConfigError(f"unknown row {name!r}; expected one of {', '.join(rows)}")
        if len(set(names)) < 2:
            raise ConfigError(f"--rows names {', '.join(names)}; expected at least two rows to compare")
        return replace(self, settings=tuple(rows[name] for name in dict.fromkeys(names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variations:
    """An experiment with p2p_diloco in which each row changes one thing.

    Attributes:
        question: the question that it answers, in one line.
        rows: changed settings by name of the row; the first row is compared with the others.
        seeds: number of trials of each row.
        optimizer: inner optimiser, if the question is about one.
    """

    question: str
    rows: Mapping[str, Mapping[str, Any]]
    seeds: int = MANY
    optimizer: OptimizerName | None = None

    def within(self, scope: Scope) -> Experiment:
        """Return the experiment at this scale, without the rows that do not fit."""
        scope = replace(scope, optimizer=self.optimizer or scope.optimizer)
        settings = tuple(scope.ours(name=name, **changes) for name, changes in self.rows.items())
        return Experiment(
            question=self.question,
            settings=tuple(one for one in settings if one.delay < one.sync_every <= one.ticks),
            seeds=self.seeds,
        )


_FLOAT32 = {"contribution": "float32", "entry": "float32"}
_EVERY_8 = {"sync_every": 8, "fragments": 2, "delay": 1}
"""Settings that `plan` recommends for a cycle of 8 steps."""

_VARIATIONS = {
    "loss": Variations(
        question="what does it cost when contributions are lost?",
        rows={
            "25%-lost": {"lost_share": 0.25},
            "none-lost": {},
            "50%-lost": {"lost_share": 0.5},
            "25%-lost-every-8": {"lost_share": 0.25, **_EVERY_8},
            "none-lost-every-8": _EVERY_8,
        },
    ),
    "bits": Variations(
        question="how few bits lose nothing?",
        rows={
            "int4": {},
            "float32": _FLOAT32,
            "int8": {"contribution": "int8", "entry": "int8"},
            "int4-up-float32-down": {"entry": "float32"},
            "int4-entries-to-nearest": {"rounds_stochastically": False},
        },
    ),
    "residual": Variations(
        question="where should the codec's residual of a contribution be kept?",
        rows={
            f"int4-{place}": {"contribution": "int4", "residual": place} for place in ("weights", "buffer", "dropped")
        },
        seeds=FEW,
    ),
    "outer": Variations(
        question="which outer rate and momentum?",
        rows={
            f"rate-{rate}-momentum-{momentum}": {"outer_rate": rate, "momentum": momentum}
            for rate, momentum in (
                (0.7, 0.3),
                (1.0, 0.5),
                (0.7, 0.5),
                (1.0, 0.3),
                (0.7, 0.7),
                (0.7, 0.9),
                (1.0, 0.7),
                (1.3, 0.3),
                (1.0, 0.0),
            )
        },
        seeds=FEW,
    ),
    "schedule": Variations(
        question="how far should the outer rate fall over the last quarter?",
        rows={f"to-{share:g}": {"outer_final_share": share} for share in (0.25, 1.0, 0.5, 0.1)},
    ),
    "merge": Variations(
        question="how should local parameters follow an entry that arrives late?",
        rows={
            f"{kind}-delay-{delay}": {"merge": kind, "alpha": alpha, "delay": delay}
            for delay in (4, 0, 16)
            for kind, alpha in (("keep", 0.0), ("blend", 0.5))
        },
    ),
    "radial": Variations(
        question="plain or radial mean?",
        rows={
            f"{kind}-rate-{rate}-momentum-{momentum}": {
                "mean": kind,
                "outer_rate": rate,
                "momentum": momentum,
            }
            for rate, momentum in ((0.7, 0.3), (0.5, 0.5), (1.0, 0.5), (1.0, 0.0))
            for kind in ("radial", "plain")
        },
        seeds=FEW,
    ),
    "sync": Variations(
        question="how often should islands exchange?",
        rows={
            f"every-{steps}": {"sync_every": steps, "delay": max(1, steps // DELAYED)}
            for steps in (32, 8, 16, 64, 128, 256)
        },
        seeds=FEW,
    ),
    "short": Variations(
        question="how short can a cycle be, and what does a late entry cost in it?",
        rows={
            f"every-{steps}-of-{fragments}-delay-{delay}": {
                "sync_every": steps,
                "fragments": fragments,
                "delay": delay,
            }
            for steps, fragments, delay in (
                (8, 2, 1),
                (8, 2, 3),
                (8, 4, 1),
                (4, 1, 1),
                (4, 1, 3),
                (4, 2, 1),
                (2, 1, 1),
            )
        },
        seeds=FEW,
    ),
    "fragments": Variations(
        question="how many fragments are best?",
        rows={f"{parts}-fragments": {"fragments": parts} for parts in (4, 1, 2, 8)},
        seeds=FEW,
    ),
    "moments": Variations(
        question="how long should AdamW's memory be, when an island sees only part of the batch?",
        rows={
            f"{beta1}-{beta2}": {"beta1": beta1, "beta2": beta2}
            for beta1, beta2 in ((0.9, 0.98), (0.8, 0.95), (0.8, 0.98), (0.9, 0.95), (0.95, 0.99))
        },
        optimizer="adamw",
    ),
    "void": Variations(
        question="what do rounds without an entry cost?",
        rows={f"{round(100 * share)}%-void": {"void_share": share} for share in (0.1, 0.0, 0.25)},
    ),
}


def _parity(scope: Scope) -> Experiment:
    rows = (scope.ours(), *often(scope), *baselines(scope), *others_often(scope))
    return Experiment(
        question="does it learn as well as one machine, and as well as other systems?",
        settings=tuple(replace(row, points=CURVE_POINTS) for row in rows),
        seeds=MANY,
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
        seeds=MANY,
    )


def _churn(scope: Scope) -> Experiment:
    shares = (0.25, 0.0, 0.5)
    return Experiment(
        question="what does it cost when islands leave and return all the time, at equal tokens?",
        settings=tuple(
            scope.ours(name=f"{round(100 * share)}%-away", away_share=share).with_tokens_of_all() for share in shares
        ),
        seeds=MANY,
    )


def _inner(scope: Scope) -> Experiment:
    with_muon, with_adamw = replace(scope, optimizer="muon"), replace(scope, optimizer="adamw")
    muon = (with_muon.ours(), *baselines(with_muon)[:2])
    return Experiment(
        question="AdamW or Muon as inner optimiser?",
        settings=(
            *(replace(row, name=f"{row.name}-muon") for row in muon),
            with_adamw.ours(),
            *baselines(with_adamw)[:2],
        ),
        seeds=MANY,
    )


def _rate(scope: Scope) -> Experiment:
    rates = tuple(scope.ours().learning_rate * factor for factor in (1.0, 0.25, 0.5, 2.0, 4.0))
    systems = (scope.ours(), *baselines(scope)[:2])
    return Experiment(
        question="which inner rate is best for each system?",
        settings=tuple(
            replace(setting, name=f"{setting.name}-{rate:g}", learning_rate=rate)
            for rate in rates
            for setting in systems
        ),
        seeds=1,
    )


def _topics(scope: Scope) -> Experiment:
    return Experiment(
        question="what does it cost when each island trains on a different kind of text?",
        settings=(
            scope.ours(name="by-topic", by_topic=True),
            scope.ours(name="mixed-text"),
            replace(baselines(scope)[1], name="textbook-by-topic", by_topic=True),
        ),
        seeds=FEW,
    )


EXPERIMENTS: dict[str, Callable[[Scope], Experiment]] = {
    "parity": _parity,
    "mixed": _mixed,
    "churn": _churn,
    "inner": _inner,
    "rate": _rate,
    "topics": _topics,
    **{name: variations.within for name, variations in _VARIATIONS.items()},
}


def experiment_named(name: str, scope: Scope) -> Experiment:
    """Return an experiment by its name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"unknown experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name](scope)
    if scope.seeds is not None:
        return replace(experiment, seeds=scope.seeds)
    return replace(experiment, seeds=min(QUICK_SEEDS, experiment.seeds)) if scope.is_quick else experiment
