"""`python -m benchmarks failures`: simulate what the failure of an island costs a swarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.commands.document import report, show
from benchmarks.goodput.failures import FRAGMENTS, FailurePlan, measure_failures, measured_row
from benchmarks.machine import describe_machine
from benchmarks.options import FailuresOptions, check_within
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.errors import ConfigError

MOST_ISLANDS = 256
LEAST_CYCLE_SECONDS = 2.0
MOST_CYCLES_OF_A_PAUSE = 3
"""A pause must be over early enough for its effects to end before the next failure."""


def bench_failures(options: FailuresOptions) -> int:
    """Simulate, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
        Violated: an invariant of the protocol was broken.
    """
    plans = plans_of(options)
    check_target(options.json)
    machine = describe_machine()
    rows = []
    for plan in plans:
        rows.append(measured_row(plan, measure_failures(plan)))
        show(row_line(rows[-1]))
    figures = failures_figures(options, rows)
    report("failures", options, figures, machine, failures_lines(figures))
    return 0


def plans_of(options: FailuresOptions) -> tuple[FailurePlan, ...]:
    """Return a plan for each size.

    Raises:
        ConfigError: an option is invalid.
    """
    words = [word.strip() for word in options.islands.split(",")]
    if not all(word.isdigit() and 1 <= int(word) <= MOST_ISLANDS for word in words):
        raise ConfigError(
            f"--islands is {options.islands!r}; expected numbers from 1 to {MOST_ISLANDS} with commas between them"
        )
    check_within("--repeat", options.repeat, 1)
    check_within("--sustained-cycles", options.sustained_cycles, 1)
    if not options.cycle_seconds >= LEAST_CYCLE_SECONDS:
        raise ConfigError(f"--cycle-seconds is {options.cycle_seconds:g}; expected at least {LEAST_CYCLE_SECONDS:g}")
    most = MOST_CYCLES_OF_A_PAUSE * options.cycle_seconds
    if not 0.0 < options.pause_seconds <= most:
        raise ConfigError(
            f"--pause-seconds is {options.pause_seconds:g}; expected more than 0, and at most {most:g}, "
            f"{MOST_CYCLES_OF_A_PAUSE} cycles"
        )
    if not options.every_seconds > 0.0:
        raise ConfigError(f"--every-seconds is {options.every_seconds:g}; expected more than 0")
    return tuple(
        FailurePlan(
            islands=int(word),
            failures=options.repeat,
            pause_seconds=options.pause_seconds,
            cycle_seconds=options.cycle_seconds,
            every_seconds=options.every_seconds,
            sustained_cycles=options.sustained_cycles,
        )
        for word in words
    )


def failures_figures(options: FailuresOptions, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document for `--json`."""
    return {
        "cycle_seconds": options.cycle_seconds,
        "rounds_per_cycle": FRAGMENTS,
        "pause_seconds": options.pause_seconds,
        "every_seconds": options.every_seconds,
        "rows": [dict(row) for row in rows],
    }


def failures_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the printed table."""
    return [
        f"cycles of {figures['cycle_seconds']:g} s in {figures['rounds_per_cycle']} rounds; an island starts again "
        f"after {figures['pause_seconds']:g} s; means per failure, in seconds of one island's training",
        *(row_line(row) for row in figures["rows"]),
    ]


def row_line(row: Mapping[str, Any]) -> str:
    """Return the line of one size of swarm."""
    error, rejoin = row["lost_seconds_error"], row["rejoin_rounds"]
    spread = f" ± {error:.1f}" if error is not None else ""
    words = f"included again after {rejoin:.1f} rounds" if rejoin is not None else "not included again"
    if row["not_rejoined"] and rejoin is not None:
        words += f" ({row['not_rejoined']} of {row['failures']} not at all)"
    return (
        f"{row['islands']:>4} islands: {row['lost_seconds']:.1f}{spread} s lost, {row['others_seconds']:.1f} s of them "
        f"by others; {row['skipped_cycles']:.2f} cycles skipped, {row['stalled_rounds']:.1f} rounds stalled, {words}; "
        f"{row['sustained_failures']} failures in {row['sustained_cycles']} cycles: {row['sustained_share']:.1%} of "
        f"training counted, expected {row['expected_share']:.1%}"
    )
