"""`python -m benchmarks averaging`: compare a whole exchange with hivemind and gloo, ratios first."""

from __future__ import annotations

from dataclasses import replace

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
from benchmarks.commands.document import check_linux, report, show
from benchmarks.interleaved import Spread
from benchmarks.machine import describe_machine
from benchmarks.options import AveragingOptions, check_within
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.rate import count_named

FEWEST_PEERS, MOST_PEERS = 2, 16
"""One row of a grid; the default `membership.group_size`."""
_HEADINGS = ("wall s", "CPU ns/param/peer", "wire B/param/peer", "peak MiB/peer")
_DIGITS = (3, 1, 3, 0)


def bench_averaging(options: AveragingOptions) -> int:
    """Measure, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid, or this is not Linux.
        PeerError, StateError, NetworkError: a process ended, failed or timed out.
    """
    plan = plan_of(options)
    check_linux("averaging", "Linux's /proc")
    machine, options = describe_machine(), replace(options, spans=plan.spans)
    with ended_politely():
        comparison = run_comparison(plan, show=show)
    report("averaging", options, document_of(comparison), machine, averaging_lines(comparison))
    return 0


def plan_of(options: AveragingOptions) -> ComparisonPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid.
    """
    check_within("--peers", options.peers, FEWEST_PEERS, MOST_PEERS)
    check_within("--repeat", options.repeat, 1)
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
