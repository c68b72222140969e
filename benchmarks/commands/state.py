"""`python -m benchmarks state`: measure how fast a newcomer fetches the whole state while donors are killed."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.commands.document import check_linux, report, show
from benchmarks.interleaved import Spread
from benchmarks.machine import describe_machine
from benchmarks.options import StateOptions, check_within
from benchmarks.state.transfer import Transfer, TransferPlan, document_of, figures_of, measure_transfers
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.errors import ConfigError

MOST_DONORS, MOST_MEGABYTES = 16, 1_000_000


def bench_state(options: StateOptions) -> int:
    """Measure, print, and return the exit code: 0, or 1 if peers ended with different bytes.

    Raises:
        ConfigError: an option is invalid, or this is not Linux.
        PeerError, StateError, NetworkError: a process ended, failed or timed out.
    """
    plan = plan_of(options)
    check_linux("state", "Linux's /proc")
    machine = describe_machine()
    with ended_politely():
        transfers = measure_transfers(plan, show=show)
    report("state", options, document_of(plan, transfers), machine, state_lines(plan, transfers))
    return 0 if all(transfer.is_equal for transfer in transfers) else 1


def plan_of(options: StateOptions) -> TransferPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid.
    """
    check_within("--donors", options.donors, 1, MOST_DONORS)
    if not 0 <= options.killed < options.donors:
        raise ConfigError(
            f"--killed is {options.killed}; expected 0 to {options.donors - 1}, so that one donor survives"
        )
    check_within("--megabytes", options.megabytes, 1, MOST_MEGABYTES)
    check_within("--repeat", options.repeat, 1)
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
