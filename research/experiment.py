"""`python -m research`: run an experiment with many islands in one process and print its table."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.training.inner_loop import OptimizerName, choose_device
from research.experiments import experiment_named
from research.learners import shape_named
from research.scope import Scope
from research.setting import Outcome
from research.table import run_experiment

SIZE, QUICK_SIZE = "tiny", "micro"
"""Default model sizes; a quick experiment ends within a quarter of an hour on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """Options of the command.

    Attributes:
        name: name of the experiment.
        quick: few seeds, and a smaller model.
        size, islands, steps, sync_every: scale of the experiment; size None: `SIZE`, or `QUICK_SIZE`.
        optimizer, inner_rate: optimiser and learning rate of the inner steps; rate None: tuned for the size.
        windows: windows of text per step of all islands together.
        rows: names separated by commas; None: all.
        seeds: seeds of each row; None: the experiment's default.
        data: path of a text; None: the standard library's source.
        device: device of the inner steps.
        keep: file of outcomes, read first and written after each trial.
        json: file for the figures, `-` for standard output.
    """

    name: str
    quick: bool
    size: str | None
    islands: int
    steps: int
    sync_every: int
    optimizer: OptimizerName
    inner_rate: float | None
    windows: int
    rows: str | None
    seeds: int | None
    data: str | None
    device: str
    keep: str | None
    json: str | None


def run_named_experiment(options: ExperimentOptions) -> int:
    """Run, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
    """
    size = options.size if options.size is not None else QUICK_SIZE if options.quick else SIZE
    _check(options, size)
    scope = Scope(
        size=size,
        islands=options.islands,
        ticks=options.steps,
        sync_every=options.sync_every,
        optimizer=options.optimizer,
        inner_rate=options.inner_rate,
        windows=options.windows,
        seeds=options.seeds,
        is_quick=options.quick,
    )
    experiment = experiment_named(options.name, scope)
    if options.rows is not None:
        experiment = experiment.only([name.strip() for name in options.rows.split(",")])
    device = str(choose_device(options.device))
    check_target(options.json)
    keep = _file_to_keep(options)
    quiet = options.json == STANDARD_OUTPUT
    progress = _Progress(sys.stderr)
    table = run_experiment(experiment, text=options.data, keep=keep, device=device, heard=progress.heard)
    progress.clear()
    write_figures(options.json, table.figures())
    if not quiet:
        print("\n".join(table.lines()))
    return 0


def _file_to_keep(options: ExperimentOptions) -> Path | None:
    if options.keep is None:
        return None
    keep = Path(options.keep)
    if not keep.parent.is_dir():
        raise ConfigError(f"there is no folder {keep.parent} for --keep")
    if options.json not in (None, STANDARD_OUTPUT) and Path(str(options.json)).resolve() == keep.resolve():
        raise ConfigError(f"--keep and --json both name {keep}, and figures would overwrite outcomes; name two files")
    return keep


def _check(options: ExperimentOptions, size: str) -> None:
    shape_named(size)
    for flag, value, least in (
        ("--islands", options.islands, 2),
        ("--steps", options.steps, options.sync_every),
        ("--sync-every", options.sync_every, 8),
        ("--windows", options.windows, 1),
        ("--seeds", options.seeds if options.seeds is not None else 1, 1),
    ):
        if value < least:
            raise ConfigError(f"{flag} is {value}; expected at least {least}")
    if options.inner_rate is not None and not 0.0 < options.inner_rate < 1.0:
        raise ConfigError(f"--inner-rate is {options.inner_rate:g}; expected more than 0 and less than 1")
    if options.steps % options.sync_every or options.sync_every % 8:
        raise ConfigError(
            f"--steps is {options.steps} and --sync-every {options.sync_every}; expected multiples of "
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
