"""Command line of the experiments. Heavy modules are imported only when an experiment runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cyclopts import App

from p2p_diloco.cli.command_line import call_command, exit_code_of
from p2p_diloco.cli.flags import FiguresFlag, TextFlag
from p2p_diloco.cli.refusals import Refusals

PROGRAM = "python -m research"


def main(arguments: Sequence[str]) -> int:
    """Run one experiment and return its exit code."""
    return exit_code_of(PROGRAM, lambda: call_command(make_app(), arguments))


def make_app() -> App:
    """Return the app: the default command runs a named experiment, the other compares a recorded run."""
    app = App(
        name=PROGRAM,
        help_format="plaintext",
        version_flags=[],
        config=Refusals(),
    )

    @app.default
    def experiment(
        name: str,
        /,
        *,
        quick: bool = False,
        size: str | None = None,
        islands: int = 4,
        steps: int = 480,
        sync_every: int = 32,
        optimizer: Literal["adamw", "muon"] = "muon",
        inner_rate: float | None = None,
        windows: int = 16,
        rows: str | None = None,
        seeds: int | None = None,
        data: str | None = None,
        device: str = "cpu",
        keep: str | None = None,
        json: FiguresFlag = None,
    ) -> int:
        """Train many islands in one process, with p2p_diloco and with other systems, and print a table.

        Parameters
        ----------
        name
            parity, mixed, loss, bits, outer, merge, radial, sync, short, fragments, schedule, residual, moments, inner,
            churn, void, topics, rate or tune
        quick
            use two seeds and the micro model
        size
            size of the model: micro, tiny, small or base; default tiny
        islands
            number of islands
        steps
            inner steps of each island
        sync_every
            steps between exchanges of a part of the model
        optimizer
            inner optimizer of all rows: adamw or muon
        inner_rate
            inner learning rate of all rows; by default tuned for the size and the optimizer
        windows
            windows of text per step of all islands together; each island has at least one
        rows
            names of the rows to run, separated by commas; default all. The first is compared with the others
        seeds
            trials of each row
        data
            file with a text; by default the source of Python's standard library
        device
            cpu, cuda, cuda:N, mps or auto (the fastest available); all published figures are from the CPU
        keep
            file of outcomes, one per line: trials in the file are not repeated, new ones are added
        """
        from research.experiment import ExperimentOptions, run_named_experiment

        options = ExperimentOptions(
            name=name,
            quick=quick,
            size=size,
            islands=islands,
            steps=steps,
            sync_every=sync_every,
            optimizer=optimizer,
            inner_rate=inner_rate,
            windows=windows,
            rows=rows,
            seeds=seeds,
            data=data,
            device=device,
            keep=keep,
            json=json,
        )
        return run_named_experiment(options)

    @app.command
    def data_parallel(*folders: Path, data: TextFlag = None, json: FiguresFlag = None) -> int:
        """Replay a run like `p2p-diloco replay`, and compare it with one machine trained on as many tokens.

        Parameters
        ----------
        folders
            state directories of the peers, each started with --keep-trace
        """
        from research.beside_a_run import compare_with_data_parallel

        return compare_with_data_parallel(folders, data=data, json=json)

    return app
