"""The commands that play with the lab, as the command line sees them; nothing heavy is imported too early."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App


def add_experiment(app: App) -> None:
    """Add the command `experiment`."""

    @app.command
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
        json: str | None = None,
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
        json
            file for the figures, or - for standard output
        """
        from p2p_diloco.cli.experiment import ExperimentOptions, run_named_experiment

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


def add_plan(app: App) -> None:
    """Add the command `plan`."""

    @app.command
    def plan(
        *,
        parameters: str,
        islands: int,
        uplink: str,
        step_seconds: float = 1.0,
        cores: int = 1,
        group_size: int = 16,
        json: str | None = None,
    ) -> int:
        """Work out what a run would need before anybody starts one: bytes, length of a cycle, speed kept.

        Parameters
        ----------
        parameters
            of the model, like 12B
        islands
            that train
        uplink
            of the slowest island, like 20mbit or 2gbit
        step_seconds
            that an inner step takes
        cores
            that share the outer work of an island; one process, as islands are today, uses one
        group_size
            peers that average in one row
        json
            file for the figures, or - for standard output
        """
        from p2p_diloco.cli.plan import PlanOptions, print_plan

        options = PlanOptions(
            parameters=parameters,
            islands=islands,
            uplink=uplink,
            step_seconds=step_seconds,
            cores=cores,
            group_size=group_size,
            json=json,
        )
        return print_plan(options)


def add_replay(app: App) -> None:
    """Add the command `replay`."""

    @app.command
    def replay(*folders: Path, data: str | None = None, data_parallel: bool = False, json: str | None = None) -> int:
        """Replay a run from the diaries of its peers, and report how close the replay comes to the run.

        Parameters
        ----------
        folders
            state directories of the peers, each started with --keep-diary
        data
            this machine's copy of the run's text
        data_parallel
            train one machine on as many tokens beside it
        json
            file for the figures, or - for standard output
        """
        from p2p_diloco.cli.replay import ReplayOptions
        from p2p_diloco.cli.replay import replay as run

        return run(ReplayOptions(folders=folders, data=data, with_data_parallel=data_parallel, json=json))
