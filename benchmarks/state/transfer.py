"""Measurement of a newcomer that fetches the whole state from donors, some of which are killed half-way.

Measured from outside, as in `benchmarks.averaging`: by the monotonic clock, the kernel's clocks of all processes, and
peaks of resident memory. Each repeat starts new processes, because killed donors are gone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.averaging.figures import MIB
from benchmarks.interleaved import Spread, spread_of
from benchmarks.meters import cpu_seconds, forget_peaks, peak_rss_bytes
from benchmarks.new_run import order_of_new_run
from benchmarks.worker_pool import WorkerPool
from p2p_diloco.protocol.repair.repair import BYTES_PER_ELEMENT_OF_STATE

START_SECONDS = 180.0
LEAD_SECONDS = 0.1
MEGABYTE = 1_000_000
FRAGMENTS, SPANS_PER_FRAGMENT = 2, 64
"""Number of spans as in a default run; the vector of this benchmark has only two tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The measurements to make.

    Attributes:
        megabytes: size of φ and m together, in millions of bytes.
        killed: number of donors to kill when half of the bytes have arrived.
    """

    megabytes: int
    donors: int
    killed: int
    repeats: int

    @property
    def parameters(self) -> int:
        """Number of elements of φ."""
        return self.megabytes * MEGABYTE // BYTES_PER_ELEMENT_OF_STATE

    @property
    def turn_seconds(self) -> float:
        """Timeout of a transfer: a minute plus the time at 4 MB/s."""
        return 60.0 + self.megabytes / 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of the state to a newcomer.

    Attributes:
        seconds: from the start until all spans had arrived and their hashes agreed with those of two donors.
        installed_seconds: from the start until all spans had arrived, checked piece by piece.
        cpu_seconds: CPU time of all processes of all peers, including killed ones up to their end.
        daemon_cpu_seconds: share of the libp2p daemons in it: the cost of carrying bytes, whatever is done with them.
        received_bytes: bytes received in answers to requests, including frames; more than the state if pieces arrived
            twice.
        peak_joiner_bytes, peak_donor_bytes: peak of resident memory of a peer's processes; of the largest donor.
        late_seconds: lag of the donors' event loops: 99th percentile and maximum.
        is_equal: whether the newcomer and the surviving donors hold the same bytes, by hash.
    """

    seconds: float
    installed_seconds: float
    cpu_seconds: float
    daemon_cpu_seconds: float
    received_bytes: int
    peak_joiner_bytes: int
    peak_donor_bytes: int
    late_seconds: tuple[float, float]
    is_equal: bool


def measure_transfers(plan: TransferPlan, show: Callable[[str], None]) -> list[Transfer]:
    """Measure all repeats.

    Raises:
        PeerError, StateError, NetworkError: a process ended, failed or timed out; all processes are stopped.
    """
    transfers = []
    with tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as folder:
        for repeat in range(plan.repeats):
            place = Path(folder) / str(repeat)
            place.mkdir()
            transfers.append(play_transfer(plan, place))
            seconds = transfers[-1].seconds
            show(f"repeat {repeat + 1} of {plan.repeats}: {seconds:.2f} s, {plan.megabytes / seconds:.0f} MB/s")
    return transfers


def play_transfer(plan: TransferPlan, folder: Path) -> Transfer:
    """Start donors and a newcomer, measure one transfer, and end all processes."""
    killed = range(plan.donors - plan.killed, plan.donors)
    with WorkerPool("state", _orders(plan), folder, worker="state.state_peer:StatePeer") as pool:
        words = pool.ask({"do": "start"}, START_SECONDS)
        pool.ask({"do": "meet", "words": words}, START_SECONDS)
        pids_by_peer = pool.pids_by_peer()
        pids = [pid for peer in pids_by_peer for pid in peer]
        lasting = [pids for place, pids in enumerate(pids_by_peer) if place not in killed]
        forget_peaks(pids)
        began_cpu, at = cpu_seconds_apart(pids_by_peer), time.monotonic() + LEAD_SECONDS
        word = {"do": "transfer", "at": at}
        *donors, joiner = pool.ask(word, plan.turn_seconds, may_end=killed)
        ended_cpu, lost_cpu = cpu_seconds_apart(lasting), joiner["lost_cpu_seconds"]
        *donor_peaks, joiner_peak = (peak_rss_bytes(peer) for peer in pids_by_peer)
        digests = [answer.get("digest") for answer in pool.ask({"do": "digest"}, START_SECONDS, may_end=killed)]
    lags = sorted(lag for donor in donors if donor for lag in donor["lags"])
    return Transfer(
        seconds=joiner["ready_at"] - at,
        installed_seconds=joiner["installed_at"] - at,
        cpu_seconds=sum(ended_cpu) + sum(lost_cpu) - sum(began_cpu),
        daemon_cpu_seconds=ended_cpu[1] + lost_cpu[1] - began_cpu[1],
        received_bytes=joiner["received_bytes"],
        peak_joiner_bytes=joiner_peak,
        peak_donor_bytes=max(donor_peaks),
        late_seconds=(lags[int(0.99 * len(lags))], lags[-1]),
        is_equal=len(set(digests) - {None}) == 1,
    )


def cpu_seconds_apart(pids_by_peer: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the CPU time of the peers' own processes, and that of their children, the daemons."""
    return sum(cpu_seconds(pids[:1]) for pids in pids_by_peer), sum(cpu_seconds(pids[1:]) for pids in pids_by_peer)


def _orders(plan: TransferPlan) -> Sequence[Mapping[str, Any]]:
    order = {
        "num_peers": plan.donors + 1,
        "parameters": plan.parameters,
        "killed": plan.killed,
        **order_of_new_run({"rounds": {"fragments": FRAGMENTS, "spans_per_fragment": SPANS_PER_FRAGMENT}}),
    }
    return [order] * (plan.donors + 1)


# -- figures


def figures_of(plan: TransferPlan, transfers: Sequence[Transfer]) -> dict[str, Spread]:
    """Return medians and quartiles over the repeats."""
    state_bytes = plan.megabytes * MEGABYTE
    taken: dict[str, list[float]] = {
        "seconds": [one.seconds for one in transfers],
        "installed_seconds": [one.installed_seconds for one in transfers],
        "megabytes_per_second": [plan.megabytes / one.seconds for one in transfers],
        "cpu_ns_per_byte": [one.cpu_seconds * 1e9 / state_bytes for one in transfers],
        "daemon_cpu_ns_per_byte": [one.daemon_cpu_seconds * 1e9 / state_bytes for one in transfers],
        "received_share": [one.received_bytes / state_bytes for one in transfers],
        "peak_joiner_mib": [one.peak_joiner_bytes / MIB for one in transfers],
        "peak_donor_mib": [one.peak_donor_bytes / MIB for one in transfers],
        "late_milliseconds": [1e3 * one.late_seconds[0] for one in transfers],
        "latest_milliseconds": [1e3 * one.late_seconds[1] for one in transfers],
    }
    return {name: spread_of(values) for name, values in taken.items()}


def document_of(plan: TransferPlan, transfers: Sequence[Transfer]) -> dict[str, Any]:
    """Return the document for `--json`."""
    figures = figures_of(plan, transfers)
    middles = {name: spread.middle for name, spread in figures.items()}
    return {
        **asdict(plan),
        "seconds": middles["seconds"],
        "installed_seconds": middles["installed_seconds"],
        "megabytes_per_second": middles["megabytes_per_second"],
        "cpu_ns_per_byte": middles["cpu_ns_per_byte"],
        "daemon_cpu_ns_per_byte": middles["daemon_cpu_ns_per_byte"],
        "received_share": middles["received_share"],
        "peak_rss_mib": {"joiner": middles["peak_joiner_mib"], "donor": middles["peak_donor_mib"]},
        "donor_loop_late_ms": {"p99": middles["late_milliseconds"], "worst": middles["latest_milliseconds"]},
        "equal": all(one.is_equal for one in transfers),
        "spread": {name: asdict(spread) for name, spread in figures.items()},
        "turns": [asdict(one) for one in transfers],
    }
