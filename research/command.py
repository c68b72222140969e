"""The command line of the research: one experiment by its name. Nothing heavy is imported before it runs."""

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
    """Return the command that takes the name of an experiment, and the one that compares a recorded run."""
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
        """Train many islands in one process, ours and what others do beside them, and print a table.

        Parameters
        ----------
        name
            parity, mixed, loss, bits, outer, merge, radial, sync, short, fragments, schedule, residual, moments, inner,
            churn, void, topics, rate or tune
        quick
            two seeds of the micro model
        size
            of the model: micro, tiny, small or base; tiny without it
        islands
            how many
        steps
            of each island
        sync_every
            steps from one exchange of a part to its next
        optimizer
            of the inner steps of all rows: adamw or muon
        inner_rate
            of the inner steps of all rows; without it what suits the size and the optimizer
        windows
            of text in a step of all islands together; each has one at least
        rows
            names with commas between; all without it. The others are compared with the first
        seeds
            trials of each row
        data
            a text; without it the source of Python's standard library
        device
            cpu, cuda, cuda:N, mps or auto, the fastest that is there; the figures quoted anywhere are of the CPU
        keep
            file of outcomes, one line each: trials that stand there are not played again, new ones are added
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
        """Replay a run as `p2p-diloco replay` does, and train one machine on as many tokens beside it.

        Parameters
        ----------
        folders
            state directories of the peers, each started with --keep-trace
        """
        from research.beside_a_run import compare_with_data_parallel

        return compare_with_data_parallel(folders, data=data, json=json)

    return app
