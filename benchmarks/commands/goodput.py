"""`python -m benchmarks goodput`: the model of goodput under failures, with the measured cost of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands.document import bench_document
from benchmarks.goodput.figures import goodput_document, goodput_lines, read_costs
from benchmarks.machine import describe_machine
from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures

KEPT_COSTS = Path(__file__).resolve().parents[2] / "docs" / "performance" / "failures.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    """Options of the command.

    Attributes:
        costs: figures of `failures`; None: those kept in `docs/performance`.
        json: file for the figures, `-` for standard output.
    """

    costs: str | None
    json: str | None


def bench_goodput(options: GoodputOptions) -> int:
    """Fit, compute, print, and return the exit code, 0.

    Raises:
        ConfigError: the file for the figures cannot be written.
        StateError: there are no measured costs.
    """
    check_target(options.json)
    figures = goodput_document(read_costs(Path(options.costs) if options.costs is not None else KEPT_COSTS))
    write_figures(options.json, bench_document("goodput", options, figures, describe_machine()))
    if options.json != STANDARD_OUTPUT:
        print("\n".join(goodput_lines(figures)))
    return 0
