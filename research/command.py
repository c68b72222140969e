"""Command line of the experiments. Heavy modules are imported only when an experiment runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cyclopts import App

from p2p_diloco.app.cli.command_line import call_command, check_typed, exit_code_of
from p2p_diloco.app.cli.options import FiguresFlag, TextFlag

PROGRAM = "python -m research"


def main(arguments: Sequence[str]) -> int:
    """Run one experiment and return its exit code."""
    return exit_code_of(PROGRAM, lambda: call_command(make_app(), arguments))


def make_app() -> App:
    """Return the app: the default command runs a named experiment; others replay a recorded run and write a text."""
    app = App(
        name=PROGRAM,
        help_format="plaintext",
        version_flags=[],
        config=check_typed,
    )

    @app.default
    def experiment(
        name: str,
        /,
        *,
        quick: bool = False,
        size: str = "micro",
        islands: int = 4,
        steps: int | None = None,
        tokens_per_parameter: float | None = None,
        optimizer: Literal["adamw", "muon"] = "muon",
        inner_rate: float | None = None,
        inner_schedule: Literal["cosine", "constant"] = "cosine",
        windows: int = 32,
        rows: str | None = None,
        seeds: int | None = None,
        data: str | None = None,
        device: str = "cpu",
        keep: str | None = None,
        tuned: str = "docs/results/tuned.json",
        json: FiguresFlag = None,
    ) -> int:
        """Train many islands in one process, with p2p_diloco and with other systems, and print a table.

        They follow the rules of evidence in research/README.md: tune first, then primary and so on.

        Parameters
        ----------
        name
            tune, primary, falling, waiting, means, cycles, few-bits, one-machine, lost, slow, norms, late or in-rows
        quick
            use two seeds, and two tokens per parameter
        size
            size of the model: micro, tiny, small or base
        islands
            number of islands
        steps
            inner steps of each island; default as many as 20 tokens per parameter take
        tokens_per_parameter
            length of a trial in place of steps: tokens of all islands for each parameter of the model
        optimizer
            inner optimizer of all rows: adamw or muon
        inner_rate
            inner learning rate of all rows; by default tuned for the size and the optimizer
        inner_schedule
            inner rate after warm-up: cosine (down to a tenth) or constant
        windows
            windows of text per step of all islands together, at least one for each
        rows
            names of the rows to run, separated by commas; default all. The first is compared with the others. For
            tune, also names of experiments, for all of their rows; default primary
        seeds
            trials of each row
        data
            file with a text; by default the source of Python's standard library
        device
            cpu, cuda, cuda:N, mps or auto (the fastest available); a GPU makes the steps of several trials together
        keep
            file of outcomes, one per line: trials in the file are not repeated, new ones are added
        tuned
            file of tuned values: tune writes them, the other experiments read them
        """
        from research.experiment import ExperimentOptions, run_named_experiment

        options = ExperimentOptions(
            name=name,
            quick=quick,
            size=size,
            islands=islands,
            steps=steps,
            tokens_per_parameter=tokens_per_parameter,
            optimizer=optimizer,
            inner_rate=inner_rate,
            inner_schedule=inner_schedule,
            windows=windows,
            rows=rows,
            seeds=seeds,
            data=data,
            device=device,
            keep=keep,
            tuned=tuned,
            json=json,
        )
        return run_named_experiment(options)

    @app.command
    def prose(file: Path, /) -> int:
        """Write the second text of the rules of evidence, from the documentation strings of pinned packages.

        Parameters
        ----------
        file
            file to write, for --data
        """
        from research.prose import write_prose

        print(f"{file}: SHA-256 {write_prose(file).hex()}")
        return 0

    @app.command
    def replay(
        *folders: Path,
        data: TextFlag = None,
        data_parallel: bool = False,
        json: FiguresFlag = None,
    ) -> int:
        """Replay a run from the traces of its peers, and report how close the replay comes to the run.

        Parameters
        ----------
        folders
            state directories of the peers, each started with --keep-trace
        data_parallel
            compare the run with one machine that trains on as many tokens, with the batch of all islands
        """
        from research.replay import replay as run

        return run(folders, data=data, json=json, data_parallel=data_parallel)

    return app
