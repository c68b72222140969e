"""Rows of evidence: each system, and the values that `tune` tries for it.

All rows get the same number of tries (rules in research/README.md). A search has two parts: inner rates with the row's
default values, then the row's other values with the best of these inner rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from p2p_diloco.config.rounds import FINAL_SHARE, STEPS_OF_A_ROUND, WANTED_FRAGMENTS
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.batch_size import LARGEST_BATCH
from p2p_diloco.protocol.rules import LIMITS_OF_TOKENS
from research.lies import LIES
from research.scope import LONGEST_CYCLE, Scope
from research.setting import OURS, Setting

TRIES = 8
"""Tries of each row, including its default."""
CYCLE = 8
"""Steps of a cycle in the primary comparison."""
_DELAYED = 16
"""Ratio of a cycle to the delay of an entry, which is at least one step, in all rows that train meanwhile. Entries of
real processes on one machine are a step late, both in rounds of three steps and of seven (research/lab-log.md)."""
_OTHERS_FRAGMENTS = 4

Values = Mapping[str, float]
"""Values by field of `Setting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A system as a row of evidence.

    Attributes:
        system: algorithm, see `SYSTEMS`.
        exchange: how it exchanges: in fragments and rounds as `plan` gives them to p2p_diloco; blocking, the whole
            model at once; in four fragments that arrive late; or after every step.
        values: values to try, the default first.
        inner: inner rates to try, as factors on that of the size and the optimiser; 1 first.
        falls: whether the outer rate falls at the end of a run whose inner rate falls, as `new --hours` writes it.
        changes: all that differs from the scope besides.
    """

    system: str
    exchange: Literal["rounds", "blocking", "late", "steps"]
    values: tuple[Values, ...] = ({},)
    inner: tuple[float, ...] = (1.0, 0.7, 1.4)
    falls: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


_PAIRS = ((0.7, 0.3), (0.7, 0.5), (0.5, 0.5), (0.5, 0.7), (1.0, 0.0), (1.0, 0.3))
"""Outer rates and momenta that all systems with an outer Nesterov step are tried with."""


def _nesterov(rate: float, momentum: float) -> tuple[Values, ...]:
    """Return all pairs, this one first."""
    pairs = ((rate, momentum), *(pair for pair in _PAIRS if pair != (rate, momentum)))
    return tuple({"outer_rate": rate, "momentum": momentum} for rate, momentum in pairs)


_INNER_ALONE = (1.0, 0.35, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
_SERVER = {"is_radial": True, "weights_by_tokens": True}
_STREAMING = tuple(
    {"outer_rate": rate, "momentum": momentum, "alpha": alpha}
    for rate, momentum, alpha in (
        (1.0, 0.7, 0.5), (0.7, 0.5, 0.5), (0.7, 0.5, 0.25), (0.7, 0.5, 0.0), (1.0, 0.3, 0.25), (1.0, 0.7, 0.25)
    )
)  # fmt: skip

_NOLOCO = tuple(
    {"outer_rate": beta, "momentum": alpha, "gamma": gamma}
    for alpha, beta, gamma in (
        (0.5, 0.7, 0.7), (0.3, 0.7, 0.7), (0.3, 1.0, 1.0), (0.0, 1.0, 1.0), (0.3, 0.7, 1.0), (0.5, 0.7, 1.0)
    )
)  # fmt: skip
"""α, β and γ of the authors' code, then others within the paper's condition for two in a group, α < γ < √(2 + α²)."""

ROWS: dict[str, Row] = {
    OURS: Row(system=OURS, exchange="rounds", values=_nesterov(0.7, 0.3), falls=True),
    f"{OURS}-steady": Row(system=OURS, exchange="rounds", values=_nesterov(0.7, 0.3)),
    f"{OURS}-plain": Row(
        system=OURS, exchange="rounds", values=_nesterov(0.7, 0.3), falls=True, changes={"mean": "plain"}
    ),
    f"{OURS}-float32": Row(
        system=OURS,
        exchange="rounds",
        values=_nesterov(0.7, 0.3),
        falls=True,
        changes={"contribution": "float32", "entry": "float32"},
    ),
    "textbook-diloco": Row(system="textbook-diloco", exchange="blocking", values=_nesterov(0.7, 0.5)),
    "textbook-diloco-falling": Row(
        system="textbook-diloco", exchange="blocking", values=_nesterov(0.7, 0.5), falls=True
    ),
    "textbook-diloco-int4": Row(system="textbook-diloco-int4", exchange="blocking", values=_nesterov(0.7, 0.5)),
    "streaming-diloco": Row(system="streaming-diloco", exchange="late", values=_STREAMING),
    "decoupled-diloco": Row(system="decoupled-diloco", exchange="late", values=_nesterov(0.5, 0.5), changes=_SERVER),
    "decoupled-diloco-int4": Row(
        system="decoupled-diloco-int4", exchange="late", values=_nesterov(0.5, 0.5), changes=_SERVER
    ),
    "sparseloco": Row(
        system="sparseloco",
        exchange="blocking",
        values=tuple(
            {"outer_rate": rate, "momentum": decay}
            for rate, decay in ((1.0, 0.95), (0.65, 0.95), (1.0, 0.9), (0.65, 0.9), (1.0, 0.8), (1.0, 0.99))
        ),
    ),
    "noloco": Row(system="noloco", exchange="blocking", values=_NOLOCO),
    "data-parallel": Row(system="data-parallel", exchange="steps", inner=_INNER_ALONE),
    "alone": Row(system="data-parallel", exchange="steps", inner=_INNER_ALONE, changes={"islands": 1}),
    "data-parallel-int4": Row(system="data-parallel-int4", exchange="steps", inner=_INNER_ALONE),
    "data-parallel-accumulated": Row(
        system="data-parallel", exchange="steps", inner=_INNER_ALONE, changes={"accumulate": CYCLE}
    ),
    "data-parallel-averaged": Row(
        system="data-parallel",
        exchange="steps",
        values=tuple({"averaging": decay} for decay in (0.98, 0.9, 0.95, 0.99, 0.995, 0.998)),
    ),
    "one-island": Row(system="one-island", exchange="blocking", values=_nesterov(0.7, 0.5)),
}
"""Rows by name, without the cycle."""
LIES_OF_ONE = (*LIES, "flip+claim")


def _strangers(setting: Setting) -> Setting:
    """Return the setting of a run in which no island counts for more than the median."""
    return replace(setting, has_strangers=True)


def _lying(lie: str, setting: Setting) -> Setting:
    return replace(_strangers(setting), lie=lie)


CIRCUMSTANCES: dict[str, Callable[[Setting], Setting]] = {
    "quarter-lost": lambda setting: replace(setting, lost_share=0.25),
    "quarter-absent": lambda setting: replace(setting, away_share=0.25),
    "half-slow": lambda setting: replace(setting, slow=setting.islands // 2),
    "half-slow-at-2": lambda setting: replace(setting, slow=setting.islands // 2, norm_ratio=2.0),
    "no-norm": lambda setting: replace(setting, claimed_norm=1e-30),
    "vast-norm": lambda setting: replace(setting, claimed_norm=1e30),
    "two-rows": lambda setting: replace(setting, rows=2),
    "four-rows": lambda setting: replace(setting, rows=4),
    "late": lambda setting: replace(setting, delay=3 * setting.sync_every // 8),
    "waiting": lambda setting: replace(setting, delay=0),
    "strangers": _strangers,
    **{f"strangers-{lie}": partial(_lying, lie) for lie in LIES_OF_ONE},
}
"""Circumstances of a row, such as `p2p-diloco-every-8/quarter-lost`: a quarter of contributions never arrive; each
island is away for a quarter of the cycles; half of the islands take four times as long for a step, with the norm limit
of a manifest or with 2, as it was; one island claims that its contributions have a norm of 1e-30, or of 1e30, before
they are clipped; means in rows; entries that come three eighths of a cycle late, or before the next
step, as if islands waited for them; none counts for more than the median, and perhaps the last one lies
(research/lies.py). A row is tuned without them."""


def _mixed(setting: Setting, scope: Scope) -> Setting:
    """Return the setting with islands of different speeds, in whole cycles with as many tokens of all together.

    Each chooses its batch as islands do (`island/batch_size.py`): one window at least, twice the planned ones at most.
    """
    speeds = scope.speeds if setting.islands > 1 else (max(scope.speeds),)
    cycles = setting.ticks * scope.islands / (sum(scope.speeds) * CYCLE)
    return replace(
        setting,
        speeds=speeds,
        ticks=max(1, round(cycles)) * CYCLE,
        largest_batch=float(LARGEST_BATCH),
        smallest_batch=1.0 / setting.batch,
    )


def _known(setting: Setting) -> Setting:
    """Return the setting with the limits of a run in which islands count by their tokens."""
    limits = LIMITS_OF_TOKENS
    return replace(
        setting,
        norm_ratio=limits["contribution_limit"],
        weight_ratio=limits["weight_clip"],
        weights_by_tokens=True,
    )


MIXED: dict[str, Callable[[Setting, Scope], Setting]] = {
    "mixed": lambda setting, scope: _known(_mixed(setting, scope)),
    "mixed-strangers": lambda setting, scope: _strangers(_mixed(setting, scope)),
}
"""Circumstances of a row with islands of different speeds, at as many tokens of all together as without: islands count
by their tokens; or none counts for more than the median."""
DILOCO_LIKE = (
    "textbook-diloco",
    "textbook-diloco-int4",
    "streaming-diloco",
    "decoupled-diloco",
    "decoupled-diloco-int4",
    "sparseloco",
    "noloco",
)
"""The rivals of the primary comparison."""


def every(name: str, steps: int) -> str:
    """Return the name of a row in cycles of so many steps, such as `sparseloco-every-8`."""
    return f"{name}-every-{steps}"


def under(circumstance: str, *names: str) -> tuple[str, ...]:
    """Return the names of rows to which something happens."""
    return tuple(f"{name}/{circumstance}" for name in names)


def as_tuned(name: str) -> str:
    """Return the name of a row without what happens to it."""
    return name.partition("/")[0]


def primary_rows() -> tuple[str, ...]:
    """Return the names of the rows of the primary comparison; the first is compared with the others."""
    return (every(OURS, CYCLE), *(every(name, CYCLE) for name in DILOCO_LIKE), "data-parallel")


def row_named(name: str) -> tuple[Row, int | None]:
    """Return a row and the steps of its cycle; None for a row without cycles.

    Raises:
        ConfigError: the row is unknown, or its cycle is missing, superfluous or too short.
    """
    name, _, circumstance = name.partition("/")
    if circumstance not in ("", *CIRCUMSTANCES, *MIXED):
        known = ", ".join((*CIRCUMSTANCES, *MIXED))
        raise ConfigError(f"unknown circumstance {circumstance!r}; expected one of {known}")
    system, _, cycle = name.partition("-every-")
    row = ROWS.get(system)
    if row is None:
        raise ConfigError(f"unknown row {name!r}; expected one of {', '.join(ROWS)}, such as {every(OURS, CYCLE)}")
    if row.exchange == "steps":
        if cycle:
            raise ConfigError(f"row {name!r} has no cycle; write {system}")
        return row, None
    least = _OTHERS_FRAGMENTS if row.exchange == "late" else 1
    if not cycle.isdecimal() or int(cycle) < least or int(cycle) % least:
        raise ConfigError(f"row {name!r} needs a cycle that {least} divides; write for example {every(system, CYCLE)}")
    return row, int(cycle)


def setting_of(name: str, scope: Scope, values: Values | None = None) -> Setting:
    """Return a row at a scale, with its default values or others.

    Args:
        values: values by field, among them the inner rate; None: the row's defaults.
    Raises:
        ConfigError: as `row_named`.
    """
    row, steps = row_named(name)
    steps = steps or LONGEST_CYCLE
    delay = max(1, steps // _DELAYED)
    base = scope.setting(name, row.system, sync_every=steps)
    if row.exchange == "rounds":
        base = replace(base, fragments=max(1, min(WANTED_FRAGMENTS, steps // STEPS_OF_A_ROUND)), delay=delay)
    elif row.exchange == "late":
        base = replace(base, fragments=_OTHERS_FRAGMENTS, delay=delay, mean="plain", weights_by_tokens=False)
    else:
        base = replace(base, fragments=1, delay=0, mean="plain", weights_by_tokens=False)
    if row.falls and scope.inner_schedule == "cosine":
        base = replace(base, outer_final_share=FINAL_SHARE)
    setting = replace(base, **row.changes, **(values if values is not None else first_tries(name, scope)[0]))  # type: ignore[arg-type]
    circumstance = name.partition("/")[2]
    if circumstance in MIXED:
        if not scope.speeds:
            raise ConfigError(f"row {name!r} needs --speeds, a number for each island, such as 1,1,1,1,16")
        return MIXED[circumstance](setting, scope)
    return CIRCUMSTANCES[circumstance](setting) if circumstance else setting


def first_tries(name: str, scope: Scope) -> tuple[dict[str, float], ...]:
    """Return the first part of a search: the row's default values with each inner rate, its default rate first."""
    row, _ = row_named(name)
    rate = scope.rate_of(scope.optimizer)
    return tuple({**row.values[0], "learning_rate": rate * factor} for factor in row.inner)


def further_tries(name: str, best: Values) -> tuple[dict[str, float], ...]:
    """Return the second part of a search: the row's other values with the inner rate of the best try so far."""
    row, _ = row_named(name)
    return tuple({**values, "learning_rate": best["learning_rate"]} for values in row.values[1:])
