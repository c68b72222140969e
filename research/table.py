"""An experiment and its table: means, spreads, and gaps of paired seeds with confidence intervals."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.errors import ConfigError
from research.intervals import Gap, paired_gap
from research.kept import KeptOutcomes
from research.setting import Outcome, Setting, run_together, run_trial, together_with
from research.stages import seeds_of
from simulator.cores import end_with_parent, usable_cores

Trial = tuple[Setting, int]
"""A setting and a seed."""
STACKED = 8
"""Most trials whose inner steps a GPU makes together: what happens between steps takes turns on one core."""


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
class Table:
    """Results of an experiment, with the outcomes of each row in order of seeds."""

    experiment: Experiment
    outcomes: dict[str, tuple[Outcome, ...]]

    def figures(self) -> dict[str, Any]:
        """Return the document for `--json`."""
        return {
            "rows": [_row(name, outcomes) for name, outcomes in self.outcomes.items()],
            "gaps": {name: gap.mean for name, gap in self.gaps().items()},
            "intervals": {name: gap.half_width for name, gap in self.gaps().items()},
            "comparisons": self.experiment.comparisons,
            "tuned": dict(self.experiment.notes),
        }

    def gaps(self) -> dict[str, Gap]:
        """Return the gap of the first row to each other row."""
        (_, first), *others = self.outcomes.items()
        return {name: paired_gap(first, outcomes, self.experiment.comparisons) for name, outcomes in others}

    def lines(self) -> list[str]:
        """Return the printed table."""
        first, gaps = next(iter(self.outcomes)), self.gaps()
        width = max(len(name) for name in self.outcomes)
        lines = [self.experiment.question]
        for name, outcomes in self.outcomes.items():
            row = _row(name, outcomes)
            spread = f" ± {row['loss_std']:.4f}" if row["loss_std"] is not None else ""
            gap = f"  {first} {_percent(gaps[name])}" if name in gaps else ""
            lines.append(
                f"{name:<{width}}  loss {row['loss']:.4f}{spread}  {row['bytes_sent_per_parameter']:8.2f} bytes{gap}"
            )
            if shares := row["sent_shares"]:
                lines.append(f"{'':<{width}}  sent of what was learnt: {', '.join(f'{share:.0%}' for share in shares)}")
            if note := self.experiment.notes.get(name):
                lines.append(f"{'':<{width}}  {note}")
        devices = sorted({outcome.device for outcomes in self.outcomes.values() for outcome in outcomes})
        if len(devices) > 1:
            lines.append(f"trials on {' and '.join(devices)}, which may differ by more than a gap")
        if self.experiment.comparisons > 1:
            family = f"{self.experiment.comparisons} comparisons together"
            lines.append(f"intervals: 95 % for {family}, over seeds and held-out text")
        return lines


def run_experiment(
    experiment: Experiment,
    *,
    text: str | None = None,
    processes: int | None = None,
    keep: Path | None = None,
    device: str = "cpu",
    heard: Callable[[Outcome, int], None] = lambda outcome, left: None,
) -> Table:
    """Run all trials, in one process per core.

    Args:
        text: path of a text; None: the standard library's source.
        processes: number of processes; None: one per core; 1: run in this process.
        keep: file of outcomes; trials with an outcome in it are not run again.
        device: device of the inner steps. On a GPU, trials share a stack of models.
        heard: called with each new outcome and the number of trials left.
    Raises:
        ConfigError: `keep` is not a file of outcomes.
        StateError: `keep` cannot be written.
    """
    kept = KeptOutcomes(keep, open_corpus(text).fingerprint)
    found: dict[tuple[str, int], Outcome] = {}
    trials = []
    for index in range(experiment.seeds):
        for setting in experiment.settings:
            seed = _seed(experiment, setting, index)
            outcome = kept.find(setting, seed)
            if outcome is None:
                trials.append((setting, seed))
            else:
                found[setting.name, seed] = outcome
    settings = {setting.name: setting for setting in experiment.settings}
    num_trials = len(found) + len(trials)
    at_once = processes if processes is not None else usable_cores()
    for outcome in _outcomes(trials, text, at_once, device):
        found[outcome.name, outcome.seed] = outcome
        kept.add(settings[outcome.name], outcome)
        heard(outcome, num_trials - len(found))
    return Table(
        experiment=experiment,
        outcomes={
            setting.name: tuple(
                found[setting.name, _seed(experiment, setting, index)] for index in range(experiment.seeds)
            )
            for setting in experiment.settings
        },
    )


def _seed(experiment: Experiment, setting: Setting, index: int) -> int:
    return seeds_of(setting.stage, experiment.seeds)[index]


def _outcomes(trials: Sequence[Trial], text: str | None, processes: int, device: str) -> Iterator[Outcome]:
    play = partial(_play, text=text, device=device)
    stacks = stacks_of(trials, processes) if device != "cpu" else [[trial] for trial in trials]
    if processes == 1 or len(stacks) < 2:
        for stack in stacks:
            yield from play(stack)
        return
    # With more threads than cores, a product of small matrices in NumPy takes ten times as long. Processes inherit it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Spawn, because PyTorch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(stacks)), mp_context=context, initializer=end_with_parent) as pool:
        for future in as_completed([pool.submit(play, stack) for stack in stacks]):
            yield from future.result()


def stacks_of(trials: Sequence[Trial], processes: int) -> list[list[Trial]]:
    """Return the trials in groups that make their inner steps together, at least one group for each process."""
    alike: dict[Setting | None, list[Trial]] = {}
    for setting, seed in trials:
        alike.setdefault(together_with(setting), []).append((setting, seed))
    most = min(STACKED, max(1, len(trials) // processes))
    return [
        group[start : start + size]
        for common, group in alike.items()
        for size in (most if common is not None else 1,)
        for start in range(0, len(group), size)
    ]


def _play(trials: Sequence[Trial], text: str | None, device: str) -> list[Outcome]:
    if device == "cpu" or together_with(trials[0][0]) is None:
        return [run_trial(setting, seed, text, device=device) for setting, seed in trials]
    return run_together(trials, text, device=device)


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    losses = [outcome.loss for outcome in outcomes]
    return {
        "name": name,
        "loss": fmean(losses),
        "loss_std": stdev(losses) if len(losses) > 1 else None,
        "seeds": len(losses),
        "tokens": outcomes[0].tokens,
        "bytes_sent_per_parameter": fmean(outcome.bytes_sent_per_parameter for outcome in outcomes),
        "sent_shares": [fmean(of) for of in zip(*(o.sent_shares for o in outcomes if o.sent_shares), strict=True)],
    }


def _percent(gap: Gap) -> str:
    interval = f" ± {100 * gap.half_width:.2f}" if gap.half_width is not None else ""
    return f"{100 * gap.mean:+.2f}{interval} %"
