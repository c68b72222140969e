"""Experiments for evidence, under the rules of research/README.md: tuned rows, seeds and held-out text of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from research.experiments import MANY, QUICK_SEEDS, Experiment
from research.rows import CYCLE, Values, every, first_tries, further_tries, primary_rows, row_named, setting_of
from research.scope import Scope
from research.setting import OURS
from research.table import Table
from research.tuned import Search, Try, best_of, find_search, read_searches, write_search

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
    "few-bits": (
        "do four bits cost anything, beside float32 in the same cycle?",
        tuple(every(system, steps) for steps in (CYCLE, 4) for system in (OURS, f"{OURS}-float32")),
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
"""Question and rows of each experiment for evidence; the first row is compared with the others."""
EVIDENCE = tuple(ROWS_OF)
"""Names of all experiments for evidence."""


def evidence_named(
    name: str, scope: Scope, searches: Sequence[Search], only: Sequence[str] | None = None
) -> Experiment:
    """Return an experiment for evidence, each row with its tuned values.

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
        seeds=scope.seeds or (QUICK_SEEDS if scope.is_quick else MANY),
        comparisons=others * TABLES_OF_THE_PRIMARY if name == "primary" else others,
    )
    if only is not None:
        experiment = experiment.only(only)
    found = {row.name: find_search(searches, row.name, scope) for row in experiment.settings}
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
    return list(dict.fromkeys(rows))


def tune_rows(
    names: Sequence[str], scope: Scope, path: Path, text: str, play: Callable[[Experiment], Table]
) -> list[Search]:
    """Search the values of rows, write each to the file when it is done, and return all.

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

    def play_tries(name: str, tries: Sequence[Values]) -> list[Try]:
        settings = [setting_of(name, scope, values) for values in tries]
        named = tuple(replace(one, name=f"{name}, {number}") for number, one in enumerate(settings, 1))
        table = play(Experiment(question=f"which values suit {name}?", settings=named, seeds=scope.seeds or 1))
        losses = [fmean(outcome.loss for outcome in outcomes) for outcomes in table.outcomes.values()]
        return [Try(values=values, loss=loss) for values, loss in zip(tries, losses, strict=True)]

    searches = []
    for name in names:
        tries = play_tries(name, first_tries(name, scope))
        if others := further_tries(name, best_of(tries).values):
            tries += play_tries(name, others)
        search = Search(
            row=name,
            size=scope.size,
            islands=scope.islands,
            optimizer=scope.optimizer,
            inner_schedule=scope.inner_schedule,
            steps=scope.ticks,
            windows=scope.windows,
            text=text,
            tries=tuple(tries),
        )
        write_search(path, search)
        searches.append(search)
    return searches
