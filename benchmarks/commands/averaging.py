"""`python -m benchmarks averaging`: compare a whole exchange with hivemind and gloo, ratios first."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from benchmarks.averaging.comparison import ComparisonPlan, run_comparison
from benchmarks.averaging.figures import (
    MEASURED,
    Comparison,
    SystemFigures,
    document_of,
    figures_of,
    idle_cores,
    ratios_to_ours,
)
from benchmarks.averaging.our_run import check_codec
from benchmarks.averaging.systems import OURS, systems_against
from benchmarks.commands.document import bench_document
from benchmarks.interleaved import Spread
from benchmarks.machine import describe_machine
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.rate import count_named

FEWEST_PEERS, MOST_PEERS = 2, 16
"""One row of a grid; the default `membership.group_size`."""
_HEADINGS = ("wall s", "CPU ns/param/peer", "wire B/param/peer", "peak MiB/peer")
_DIGITS = (3, 1, 3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """Options of the command.

    Attributes:
        parameters: length of the vector, like `10M`.
        codec: codec of p2p_diloco.
        against: systems to compare with, separated by commas.
        spans: pieces in which p2p_diloco exchanges; None: as `plan` recommends.
        repeat: number of measured turns of each system.
        json: file for the figures, `-` for standard output.
    """

    peers: int
    parameters: str
    codec: str
    against: str
    spans: int | None
    repeat: int
    json: str | None


def bench_averaging(options: AveragingOptions) -> int:
    """Measure, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid, or this is not Linux.
        PeerError, StateError, NetworkError: a process ended, failed or timed out.
    """
    plan = plan_of(options)
    if sys.platform != "linux":
        raise ConfigError("the averaging benchmark needs Linux's /proc; run it on Linux")
    machine, options = describe_machine(), replace(options, spans=plan.spans)
    with ended_politely():
        comparison = run_comparison(plan, show=lambda text: print(text, file=sys.stderr, flush=True))
    write_figures(options.json, bench_document("averaging", options, document_of(comparison), machine))
    if options.json != STANDARD_OUTPUT:
        print("\n".join(averaging_lines(comparison)))
    return 0


def plan_of(options: AveragingOptions) -> ComparisonPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid.
    """
    if not FEWEST_PEERS <= options.peers <= MOST_PEERS:
        raise ConfigError(f"--peers is {options.peers}; expected {FEWEST_PEERS} to {MOST_PEERS}")
    if options.repeat < 1:
        raise ConfigError(f"--repeat is {options.repeat}; expected at least 1")
    if options.spans is not None and not options.peers <= options.spans <= 2048:
        raise ConfigError(f"--spans is {options.spans}; expected {options.peers} to 2048, one for each peer at least")
    check_codec(options.codec)
    check_target(options.json)
    parameters = count_named(options.parameters)
    return ComparisonPlan(
        systems=systems_against(options.against),
        num_peers=options.peers,
        parameters=parameters,
        codec=options.codec,
        spans=options.spans or suited_spans(parameters, options.peers),
        repeats=options.repeat,
    )


def averaging_lines(comparison: Comparison) -> list[str]:
    """Return the printed tables: ratios, then figures, then notes on what was counted."""
    width = max(map(len, comparison.turns)) + 2
    heading = "".join(f"{heading:>26}" for heading in _HEADINGS)
    lines = [
        f"{comparison.num_peers} peers, {comparison.parameters:,} parameters, {comparison.codec}, "
        f"{comparison.num_cores} cores, {comparison.repeats} repeats in turn: medians and quartiles"
    ]
    opponents = [system for system in comparison.turns if system != OURS]
    if opponents:
        lines += ["", f"{'times ours':{width}}{heading}"]
        lines += [f"{system:{width}}{_ratio_words(comparison, system)}" for system in opponents]
    lines += ["", f"{'':{width}}{heading}  results"]
    lines += [f"{system:{width}}{_figure_words(figures_of(comparison, system))}" for system in comparison.turns]
    return [*lines, "", *_remarks(comparison)]


def _ratio_words(comparison: Comparison, system: str) -> str:
    ratios = ratios_to_ours(comparison, system)
    return "".join(f"{_spread_words(ratios[name], 2, 'x'):>26}" for name in MEASURED)


def _figure_words(figures: SystemFigures) -> str:
    words = [
        f"{_spread_words(getattr(figures, name), digits):>26}" for name, digits in zip(MEASURED, _DIGITS, strict=True)
    ]
    return "".join(words) + ("  equal" if figures.results_equal else "  DIFFER")


def _spread_words(spread: Spread, digits: int, unit: str = "") -> str:
    return f"{spread.middle:.{digits}f}{unit} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def _remarks(comparison: Comparison) -> list[str]:
    network = "bytes sent over loopback, with headers and acknowledgements, "
    network += (
        "in a private network per system" if comparison.on_own_network else "OTHER PROGRAMS' TOO: no private network"
    )
    kept = "all processes ran until the end" if comparison.kept_alive else "processes were started for each turn"
    return [
        f"wire: {network}",
        f"CPU and memory: all processes, with daemons; {kept}; waiting ones used {idle_cores(comparison):.3f} cores",
        "results: whether all peers ended with the same bytes, by hash",
    ]
