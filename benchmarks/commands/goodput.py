"""`python -m benchmarks goodput`: the model of goodput under failures, with the measured cost of a failure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.commands.document import report
from benchmarks.goodput.figures import goodput_document, goodput_lines, read_costs
from benchmarks.machine import describe_machine
from benchmarks.options import GoodputOptions
from p2p_diloco.app.cli.output import check_target

KEPT_COSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "figures" / "failures.json"


def bench_goodput(options: GoodputOptions) -> int:
    """Fit, compute, print, and return the exit code, 0.

    Raises:
        ConfigError: the file for the figures cannot be written.
        StateError: there are no measured costs.
    """
    check_target(options.json)
    figures = goodput_document(read_costs(Path(options.costs) if options.costs is not None else KEPT_COSTS))
    report("goodput", options, figures, describe_machine(), goodput_lines(figures))
    return 0
