"""`python -m benchmarks memory`: measure a peer's memory beyond training, for several model sizes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.commands.document import check_linux, report, show
from benchmarks.footprint.figures import (
    GOAL_BYTES_PER_PARAMETER,
    GOAL_CONSTANT_BYTES,
    MIB,
    Line,
    SizeFigures,
    document_of,
    peak_line,
    steady_line,
)
from benchmarks.footprint.play import FootprintPlan, measure_footprints
from benchmarks.footprint.shapes import shape_of
from benchmarks.machine import describe_machine
from benchmarks.options import MemoryOptions, check_within
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.rate import count_named

FEWEST_PEERS, MOST_PEERS = 2, 16


def bench_memory(options: MemoryOptions) -> int:
    """Measure, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid, or this is not Linux.
        PeerError, StateError, NetworkError: a process ended, failed or timed out.
    """
    plan = plan_of(options)
    check_linux("memory", "Linux's /proc")
    machine = describe_machine()
    with ended_politely():
        sizes = measure_footprints(plan, show=show)
    figures = document_of(sizes, plan.num_peers)
    report("memory", options, figures, machine, memory_lines(sizes, plan.num_peers))
    return 0


def plan_of(options: MemoryOptions) -> FootprintPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid.
    """
    check_within("--peers", options.peers, FEWEST_PEERS, MOST_PEERS)
    sizes = tuple(count_named(word) for word in options.parameters.split(","))
    for size in sizes:
        shape_of(size)
    check_target(options.json)
    return FootprintPlan(num_peers=options.peers, parameters=sizes)


def memory_lines(sizes: Sequence[SizeFigures], num_peers: int) -> list[str]:
    """Return the printed table: a row per size, then the fitted lines."""
    lines = [
        f"{num_peers} peers; resident MiB at the peak of the largest peer, compared with training alone",
        "   parameters  training    peer  daemon  beyond   goal  on average  results",
    ]
    lines += [_size_line(size) for size in sizes]
    for name, line in (("at the peak", peak_line(sizes)), ("on average", steady_line(sizes))):
        if line is not None:
            lines.append(f"{name}: {_line_words(line)}")
    goal = Line(slope=GOAL_BYTES_PER_PARAMETER, constant=GOAL_CONSTANT_BYTES)
    return [*lines, f"goal: {_line_words(goal)}"]


def _size_line(size: SizeFigures) -> str:
    largest = size.largest
    held = (size.alone.peak, largest.peer.peak, largest.daemon.peak, size.beyond, size.goal, size.beyond_steady)
    words = "".join(f"{value / MIB:{width}.0f}" for value, width in zip(held, (10, 8, 8, 8, 7, 12), strict=True))
    equal = "equal" if size.results_equal else "DIFFER"
    return f"{size.parameters:>13,}{words}  {equal}, {size.num_entries} entries of {size.num_rounds} rounds"


def _line_words(line: Line) -> str:
    return f"{line.slope:.2f} bytes per parameter and {line.constant / 1e6:.0f} MB beyond training"
