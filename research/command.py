"""Command line of the experiments. Heavy modules are imported only when an experiment runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyclopts import App

from p2p_diloco.app.cli.command_line import call_command, check_typed, exit_code_of
from p2p_diloco.app.cli.options import FiguresFlag, TextFlag
from research.options import ExperimentOptions

PROGRAM = "python -m research"
_DEFAULTS = ExperimentOptions()


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
    def experiment(name: str, /, *, options: ExperimentOptions = _DEFAULTS) -> int:
        """Train many islands in one process, with p2p_diloco and with other systems, and print a table.

        They follow the rules of evidence in research/README.md: tune first, then primary and so on.

        Parameters
        ----------
        name
            tune, primary, falling, waiting, means, cycles, few-bits, one-machine, lost, slow, norms, late, in-rows,
            mixed or lies
        """
        from research.experiment import run_named_experiment

        return run_named_experiment(name, options)

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
