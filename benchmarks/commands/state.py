"""`python -m benchmarks state`: measure how fast a newcomer fetches the whole state while donors are killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.commands.document import bench_document
from benchmarks.interleaved import Spread
from benchmarks.machine import describe_machine
from benchmarks.state.transfer import Transfer, TransferPlan, document_of, figures_of, measure_transfers
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError

MOST_DONORS, MOST_MEGABYTES = 16, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Options of the command.

    Attributes:
        megabytes: size of the state.
        killed: number of donors to kill half-way.
        repeat: number of transfers.
        json: file for the figures, `-` for standard output.
    """

    megabytes: int
    donors: int
    killed: int
    repeat: int
    json: str | None


def bench_state(options: StateOptions) -> int:
    """Measure, print, and return the exit code: 0, or 1 if peers ended with different bytes.

    Raises:
        ConfigError: an option is invalid, or this is not Linux.
        PeerError, StateError, NetworkError: a process ended, failed or timed out.
    """
    plan = plan_of(options)
    if sys.platform != "linux":
        raise ConfigError("the state benchmark needs Linux's /proc; run it on Linux")
    machine = describe_machine()
    with ended_politely():
        transfers = measure_transfers(plan, show=lambda text: print(text, file=sys.stderr, flush=True))
    write_figures(options.json, bench_document("state", options, document_of(plan, transfers), machine))
    if options.json != STANDARD_OUTPUT:
        print("\n".join(state_lines(plan, transfers)))
    return 0 if all(transfer.is_equal for transfer in transfers) else 1


def plan_of(options: StateOptions) -> TransferPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid.
    """
    if not 1 <= options.donors <= MOST_DONORS:
        raise ConfigError(f"--donors is {options.donors}; expected 1 to {MOST_DONORS}")
    if not 0 <= options.killed < options.donors:
        raise ConfigError(
            f"--killed is {options.killed}; expected 0 to {options.donors - 1}, so that one donor survives"
        )
    if not 1 <= options.megabytes <= MOST_MEGABYTES:
        raise ConfigError(f"--megabytes is {options.megabytes}; expected 1 to {MOST_MEGABYTES}")
    if options.repeat < 1:
        raise ConfigError(f"--repeat is {options.repeat}; expected at least 1")
    check_target(options.json)
    return TransferPlan(
        megabytes=options.megabytes, donors=options.donors, killed=options.killed, repeats=options.repeat
    )


def state_lines(plan: TransferPlan, transfers: Sequence[Transfer]) -> list[str]:
    """Return the printed table."""
    figures = figures_of(plan, transfers)
    are_equal = all(transfer.is_equal for transfer in transfers)
    rows = [
        ("MB/s, overall", "megabytes_per_second", 0),
        ("until verified and ready, s", "seconds", 2),
        ("until all spans arrived, s", "installed_seconds", 2),
        ("CPU, all processes, ns/byte", "cpu_ns_per_byte", 1),
        ("of that, libp2p daemons", "daemon_cpu_ns_per_byte", 1),
        ("received / size of state", "received_share", 3),
        ("peak of the newcomer, MiB", "peak_joiner_mib", 0),
        ("peak of a donor, MiB", "peak_donor_mib", 0),
        ("lag of donors' loops, p99, ms", "late_milliseconds", 1),
        ("lag of donors' loops, max, ms", "latest_milliseconds", 1),
    ]
    return [
        f"{plan.megabytes} MB of state from {plan.donors} donors, {plan.killed} killed half-way, "
        f"{plan.repeats} repeats: median and quartiles",
        *(f"{words:<30}  {_spread_words(figures[name], digits)}" for words, name, digits in rows),
        f"{'bytes at the end':<30}  {'equal' if are_equal else 'DIFFER'}",
    ]


def _spread_words(spread: Spread, digits: int) -> str:
    return f"{spread.middle:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"
