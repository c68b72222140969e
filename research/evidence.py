"""Experiments, under the rules of research/README.md: tuned rows, seeds and held-out text of the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from research.rows import (
    CYCLE,
    LIES_OF_ONE,
    Values,
    as_tuned,
    every,
    first_tries,
    further_tries,
    primary_rows,
    row_named,
    setting_of,
    under,
)
from research.scope import Scope
from research.setting import OURS
from research.table import Experiment, Table
from research.tuned import Search, Try, best_of, find_search, read_searches, write_search

SEEDS, QUICK_SEEDS = 8, 2
"""Trials of each row."""
_OURS = every(OURS, CYCLE)
_SERVERS = (every("textbook-diloco", CYCLE), every("decoupled-diloco-int4", CYCLE))
_LATE = (every("streaming-diloco", CYCLE), every("decoupled-diloco-int4", CYCLE))
TABLES_OF_THE_PRIMARY = 6
"""Three numbers of islands and two texts, which count as one family of comparisons."""
ROWS_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    "primary": ("is p2p_diloco level with the best system of DiLoCo's kind, in cycles of 8 steps?", primary_rows()),
    "cycles": (
        "how often should each system exchange?",
        tuple(
            every(system, steps)
            for steps in (CYCLE, 4, 32)
            for system in (OURS, "textbook-diloco", "streaming-diloco", "decoupled-diloco-int4")
        ),
    ),
    "falling": (
        "what does an outer rate that falls at the end give, to p2p_diloco and to textbook DiLoCo?",
        tuple(every(row, CYCLE) for row in (OURS, f"{OURS}-steady", "textbook-diloco-falling", "textbook-diloco")),
    ),
    "waiting": (
        "what does it cost that islands train on while an entry is under way?",
        (_OURS, *under("waiting", _OURS), every("textbook-diloco-falling", CYCLE)),
    ),
    "means": (
        "does a radial mean learn better than a plain one?",
        tuple(every(row, CYCLE) for row in (OURS, f"{OURS}-plain")),
    ),
    "few-bits": (
        "do four bits cost anything, beside float32 in the same cycle?",
        tuple(every(system, steps) for steps in (CYCLE, 4) for system in (OURS, f"{OURS}-float32")),
    ),
    "lost": (
        "what does it cost when a quarter of contributions are lost, beside islands that are away and a server?",
        (
            *under("quarter-lost", _OURS),
            _OURS,
            *under("quarter-absent", _OURS),
            *(row for name in _SERVERS for row in (*under("quarter-lost", name), name)),
        ),
    ),
    "slow": (
        "what does it cost when half of the islands are four times slower, at equal cycles?",
        (
            *under("half-slow", _OURS),
            _OURS,
            *under("half-slow-at-2", _OURS),
            *(row for name in _SERVERS for row in (*under("half-slow", name), name)),
        ),
    ),
    "mixed": (
        "what do islands of different speeds cost (--speeds), at as many tokens of all together?",
        (
            *under("mixed", _OURS),
            _OURS,
            *under("mixed", "alone", *_SERVERS),
            *under("mixed-strangers", _OURS),
        ),
    ),
    "lies": (
        "what can one liar do by what it sends, where no island counts for more than the median?",
        under("strangers", _OURS) + tuple(f"{_OURS}/strangers-{lie}" for lie in LIES_OF_ONE),
    ),
    "norms": (
        "what can an island do to the others with the norms that it claims?",
        (_OURS, *under("no-norm", _OURS), *under("vast-norm", _OURS)),
    ),
    "late": (
        "what does it cost when entries come three steps late, as on a thin line?",
        (*under("late", _OURS), _OURS, *(row for name in _LATE for row in (*under("late", name), name))),
    ),
    "in-rows": (
        "what does it cost to average in rows, as large swarms do?",
        (*under("two-rows", _OURS), _OURS, *under("four-rows", _OURS)),
    ),
    "one-machine": (
        "what is the best that one machine with the batch of all islands can do?",
        (
            every(OURS, CYCLE),
            "data-parallel",
            "data-parallel-int4",
            "data-parallel-averaged",
            "data-parallel-accumulated",
            every("one-island", CYCLE),
        ),
    ),
}
"""Question and rows of each experiment; the first row is compared with the others."""
EVIDENCE = tuple(ROWS_OF)
"""Names of all experiments."""


def evidence_named(
    name: str, scope: Scope, searches: Sequence[Search], only: Sequence[str] | None = None
) -> Experiment:
    """Return an experiment, each row with its tuned values.

    Args:
        only: names of the rows to take; None: all. Intervals are corrected for all.
    Raises:
        ConfigError: a row is unknown or not tuned at this scale.
    """
    question, rows = ROWS_OF[name]
    all_rows = tuple(setting_of(row, scope) for row in rows)
    others = len(rows) - 1
    experiment = Experiment(
        question=question,
        settings=all_rows,
        seeds=scope.seeds or (QUICK_SEEDS if scope.is_quick else SEEDS),
        comparisons=others * TABLES_OF_THE_PRIMARY if name == "primary" else others,
    )
    if only is not None:
        experiment = experiment.only(only)
    found = {row.name: find_search(searches, as_tuned(row.name), scope) for row in experiment.settings}
    return replace(
        experiment,
        settings=tuple(setting_of(row, scope, search.best.values) for row, search in found.items()),
        notes={row: search.note() for row, search in found.items()},
    )


def rows_to_tune(names: Sequence[str] | None) -> list[str]:
    """Return the names of rows, with the name of an experiment standing for all of its rows.

    Args:
        names: names of rows and of experiments; None: the primary comparison.
    """
    rows = [row for name in names or ["primary"] for row in (ROWS_OF[name][1] if name in ROWS_OF else (name,))]
    return list(dict.fromkeys(map(as_tuned, rows)))


def tune_rows(
    names: Sequence[str], scope: Scope, path: Path, text: str, play: Callable[[Experiment], Table]
) -> list[Search]:
    """Search the values of rows, write them to the file, and return them.

    Args:
        path: file of tuned values.
        text: first digits of the fingerprint of the text.
        play: runs an experiment.
    Raises:
        ConfigError: a row is unknown, or the file is not one of tuned values.
        StateError: the file cannot be written.
    """
    read_searches(path)
    for name in names:
        row_named(name)  # refuses an unknown one before any trial

    tries = play_tries({name: first_tries(name, scope) for name in names}, scope, play)
    further = {name: further_tries(name, best_of(tries[name]).values) for name in names}
    for name, others in play_tries({name: one for name, one in further.items() if one}, scope, play).items():
        tries[name] += others
    searches = []
    for name in names:
        search = Search(
            row=name,
            size=scope.size,
            islands=scope.islands,
            optimizer=scope.optimizer,
            inner_schedule=scope.inner_schedule,
            steps=scope.ticks,
            windows=scope.windows,
            text=text,
            tries=tuple(tries[name]),
        )
        write_search(path, search)
        searches.append(search)
    return searches


def play_tries(
    wanted: Mapping[str, Sequence[Values]], scope: Scope, play: Callable[[Experiment], Table]
) -> dict[str, list[Try]]:
    """Return all tries by row, with their losses."""
    settings = {
        (row, number): replace(setting_of(row, scope, values), name=f"{row}, {number}")
        for row, tries in wanted.items()
        for number, values in enumerate(tries, 1)
    }
    if not settings:
        return {}
    experiment = Experiment(
        question=f"which values suit {', '.join(wanted)}?", settings=tuple(settings.values()), seeds=scope.seeds or 1
    )
    outcomes = play(experiment).outcomes
    return {
        row: [
            Try(values=values, loss=fmean(outcome.loss for outcome in outcomes[settings[row, number].name]))
            for number, values in enumerate(tries, 1)
        ]
        for row, tries in wanted.items()
    }
