"""`python -m research`: run an experiment with many islands in one process and print its table."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.training.data import open_corpus
from p2p_diloco.training.inner_loop import OptimizerName, Schedule, choose_device
from research.evidence import EVIDENCE, evidence_named, rows_to_tune, tune_rows
from research.experiments import Experiment, experiment_named
from research.learners import shape_named
from research.scope import Scope
from research.setting import Outcome
from research.stages import Stage
from research.table import Table, run_experiment
from research.tuned import read_searches

SIZE, SMALL_SIZE = "tiny", "micro"
"""Default model sizes; a quick experiment ends within a quarter of an hour on two cores."""
STEPS = 480
"""Inner steps of a trial for exploring."""
TOKENS, QUICK_TOKENS = 20.0, 2.0
"""Tokens per parameter of a trial for evidence."""
WINDOWS: dict[Stage, int] = {"explore": 16, "tune": 32, "test": 32}
"""Windows per step of all islands together."""
TUNE = "tune"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """Options of the command.

    Attributes:
        name: name of the experiment.
        quick: few seeds, and a smaller model.
        size, islands, sync_every: scale of the experiment; size None: `SIZE`, or `SMALL_SIZE` if quick or for evidence.
        steps, tokens_per_parameter: length of a trial, one of them; None: `STEPS`, or for evidence `TOKENS`.
        optimizer, inner_rate: optimiser and learning rate of the inner steps; rate None: tuned for the size.
        inner_schedule: schedule of the inner rate.
        windows: windows of text per step of all islands together; None: `WINDOWS`.
        rows: names separated by commas; None: all.
        seeds: seeds of each row; None: the experiment's default.
        data: path of a text; None: the standard library's source.
        device: device of the inner steps.
        keep: file of outcomes, read first and written after each trial.
        tuned: file of tuned values, which `tune` writes and evidence reads.
        json: file for the figures, `-` for standard output.
    """

    name: str
    quick: bool
    size: str | None
    islands: int
    steps: int | None
    tokens_per_parameter: float | None
    sync_every: int
    optimizer: OptimizerName
    inner_rate: float | None
    inner_schedule: Schedule
    windows: int | None
    rows: str | None
    seeds: int | None
    data: str | None
    device: str
    keep: str | None
    tuned: str
    json: str | None


def run_named_experiment(options: ExperimentOptions) -> int:
    """Run, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
    """
    stage: Stage = "tune" if options.name == TUNE else "test" if options.name in EVIDENCE else "explore"
    scope = _scope(options, stage)
    rows = None if options.rows is None else [name.strip() for name in options.rows.split(",")]
    device = str(choose_device(options.device))
    check_target(options.json)
    keep, tuned = _file_to_keep(options), Path(options.tuned)
    progress = _Progress(sys.stderr)

    def play(experiment: Experiment) -> Table:
        return run_experiment(experiment, text=options.data, keep=keep, device=device, heard=progress.heard)

    if stage == "tune":
        text = open_corpus(options.data).fingerprint.hex()[:16]
        searches = tune_rows(rows_to_tune(rows), scope, tuned, text, play)
        figures = {"searches": [asdict(search) for search in searches]}
        lines = [f"{search.row}: loss {search.best.loss:.4f}, {search.note()}" for search in searches]
    else:
        if stage == "test":
            experiment = evidence_named(options.name, scope, read_searches(tuned), rows)
        else:
            experiment = experiment_named(options.name, scope)
            experiment = experiment.only(rows) if rows is not None else experiment
        table = play(experiment)
        figures, lines = table.figures(), table.lines()
    progress.clear()
    write_figures(options.json, figures)
    if options.json != STANDARD_OUTPUT:
        print("\n".join(lines))
    return 0


def _scope(options: ExperimentOptions, stage: Stage) -> Scope:
    """Return the scale that the options ask for."""
    is_evidence = stage != "explore"
    size = options.size or (SMALL_SIZE if options.quick or is_evidence else SIZE)
    windows = options.windows if options.windows is not None else WINDOWS[stage]
    tokens = options.tokens_per_parameter
    if tokens is not None and options.steps is not None:
        raise ConfigError("--steps and --tokens-per-parameter both set the length of a trial; give one of them")
    if tokens is not None and not 0.0 < tokens < math.inf:
        raise ConfigError(f"--tokens-per-parameter is {tokens:g}; expected more than 0")
    if tokens is None and is_evidence and options.steps is None:
        tokens = QUICK_TOKENS if options.quick else TOKENS
    shape = shape_named(size)
    if tokens is None:
        steps = options.steps if options.steps is not None else STEPS
    else:
        steps = whole_cycles(tokens * shape.num_parameters / (windows * shape.context), options.sync_every)
    _check(options, steps, windows)
    return Scope(
        size=size,
        islands=options.islands,
        ticks=steps,
        sync_every=options.sync_every,
        optimizer=options.optimizer,
        inner_rate=options.inner_rate,
        inner_schedule=options.inner_schedule,
        windows=windows,
        seeds=options.seeds,
        is_quick=options.quick,
        stage=stage,
    )


def whole_cycles(steps: float, sync_every: int) -> int:
    """Return the number of steps, rounded up to whole cycles."""
    return max(1, math.ceil(steps / sync_every)) * sync_every


def _file_to_keep(options: ExperimentOptions) -> Path | None:
    if options.keep is None:
        return None
    keep = Path(options.keep)
    if not keep.parent.is_dir():
        raise ConfigError(f"there is no folder {keep.parent} for --keep")
    if options.json not in (None, STANDARD_OUTPUT) and Path(str(options.json)).resolve() == keep.resolve():
        raise ConfigError(f"--keep and --json both name {keep}, and figures would overwrite outcomes; name two files")
    return keep


def _check(options: ExperimentOptions, steps: int, windows: int) -> None:
    for flag, value, least in (
        ("--islands", options.islands, 2),
        ("--steps", steps, options.sync_every),
        ("--sync-every", options.sync_every, 8),
        ("--windows", windows, 1),
        ("--seeds", options.seeds if options.seeds is not None else 1, 1),
    ):
        if value < least:
            raise ConfigError(f"{flag} is {value}; expected at least {least}")
    if options.inner_rate is not None and not 0.0 < options.inner_rate < 1.0:
        raise ConfigError(f"--inner-rate is {options.inner_rate:g}; expected more than 0 and less than 1")
    if steps % options.sync_every or options.sync_every % 8:
        raise ConfigError(
            f"--steps is {steps} and --sync-every {options.sync_every}; expected multiples of "
            f"{options.sync_every} and of 8"
        )


class _Progress:
    """Progress line on a terminal; no output elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._began = time.monotonic()
        self._done = 0

    def heard(self, outcome: Outcome, left: int) -> None:
        """Show the outcome of a trial."""
        self._done += 1
        if self._stream is not None:
            seconds = (time.monotonic() - self._began) / self._done * left
            line = f"{outcome.name}: {outcome.loss:.4f}; {left} trials left, about {seconds:.0f} s"
            print(f"\r\033[K{line}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Erase the line."""
        if self._stream is not None:
            print("\r\033[K", end="", file=self._stream, flush=True)
