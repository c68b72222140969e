"""`python -m research`: run an experiment with many islands in one process and print its table."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.app.training.inner_loop import choose_device
from p2p_diloco.errors import ConfigError
from research.evidence import EVIDENCE, evidence_named, rows_to_tune, tune_rows
from research.learners import shape_named
from research.options import ExperimentOptions
from research.scope import LONGEST_CYCLE, Scope
from research.setting import Outcome
from research.stages import Stage
from research.table import Experiment, Table, run_experiment
from research.tuned import read_searches

TOKENS, QUICK_TOKENS = 20.0, 2.0
"""Tokens per parameter of a trial."""
TUNE = "tune"


def run_named_experiment(name: str, options: ExperimentOptions) -> int:
    """Run, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
    """
    if name not in (TUNE, *EVIDENCE):
        raise ConfigError(f"unknown experiment {name!r}; expected one of {', '.join((TUNE, *EVIDENCE))}")
    stage: Stage = "tune" if name == TUNE else "test"
    scope = _scope(options, stage)
    rows = None if options.rows is None else [name.strip() for name in options.rows.split(",")]
    device = str(choose_device(options.device))
    check_target(options.json)
    keep, tuned = _file_to_keep(options), Path(options.tuned)
    progress = Progress(sys.stderr)

    def play(experiment: Experiment) -> Table:
        return run_experiment(experiment, text=options.data, keep=keep, device=device, heard=progress.heard)

    if stage == "tune":
        text = open_corpus(options.data).fingerprint.hex()[:16]
        searches = tune_rows(rows_to_tune(rows), scope, tuned, text, play)
        figures = {"searches": [asdict(search) for search in searches]}
        lines = [f"{search.row}: loss {search.best.loss:.4f}, {search.note()}" for search in searches]
    else:
        table = play(evidence_named(name, scope, read_searches(tuned), rows))
        figures, lines = table.figures(), table.lines()
    progress.clear()
    write_figures(options.json, figures)
    if options.json != STANDARD_OUTPUT:
        print("\n".join(lines))
    return 0


def _scope(options: ExperimentOptions, stage: Stage) -> Scope:
    """Return the scale that the options ask for."""
    _check(options)
    tokens = options.tokens_per_parameter
    if tokens is not None and options.steps is not None:
        raise ConfigError("--steps and --tokens-per-parameter both set the length of a trial; give one of them")
    if tokens is not None and not 0.0 < tokens < math.inf:
        raise ConfigError(f"--tokens-per-parameter is {tokens:g}; expected more than 0")
    shape = shape_named(options.size)
    if options.steps is not None:
        steps = options.steps
    else:
        tokens = tokens or (QUICK_TOKENS if options.quick else TOKENS)
        steps = whole_cycles(tokens * shape.num_parameters / (options.windows * shape.context))
    if steps < LONGEST_CYCLE or steps % LONGEST_CYCLE:
        raise ConfigError(f"--steps is {steps}; expected a multiple of {LONGEST_CYCLE}")
    speeds = _speeds_of(options)
    return Scope(
        size=options.size,
        islands=len(speeds) or options.islands,
        speeds=speeds,
        ticks=steps,
        optimizer=options.optimizer,
        inner_rate=options.inner_rate,
        inner_schedule=options.inner_schedule,
        windows=options.windows,
        seeds=options.seeds,
        is_quick=options.quick,
        stage=stage,
    )


def _speeds_of(options: ExperimentOptions) -> tuple[float, ...]:
    if options.speeds is None:
        return ()
    try:
        speeds = tuple(map(float, options.speeds.split(",")))
    except ValueError:
        speeds = ()
    if len(speeds) < 2 or not all(0.0 < speed < math.inf for speed in speeds):
        raise ConfigError(f"--speeds is {options.speeds!r}; expected a number for each island, such as 1,1,1,1,16")
    return speeds


def whole_cycles(steps: float) -> int:
    """Return the number of steps, rounded up to whole cycles."""
    return max(1, math.ceil(steps / LONGEST_CYCLE)) * LONGEST_CYCLE


def _file_to_keep(options: ExperimentOptions) -> Path | None:
    if options.keep is None:
        return None
    keep = Path(options.keep)
    if not keep.parent.is_dir():
        raise ConfigError(f"there is no folder {keep.parent} for --keep")
    if options.json not in (None, STANDARD_OUTPUT) and Path(str(options.json)).resolve() == keep.resolve():
        raise ConfigError(f"--keep and --json both name {keep}, and figures would overwrite outcomes; name two files")
    return keep


def _check(options: ExperimentOptions) -> None:
    for flag, value, least in (
        ("--islands", options.islands, 2),
        ("--windows", options.windows, 1),
        ("--seeds", options.seeds if options.seeds is not None else 1, 1),
    ):
        if value < least:
            raise ConfigError(f"{flag} is {value}; expected at least {least}")
    if options.inner_rate is not None and not 0.0 < options.inner_rate < 1.0:
        raise ConfigError(f"--inner-rate is {options.inner_rate:g}; expected more than 0 and less than 1")


class Progress:
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
