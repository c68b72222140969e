"""Measurements of each size, and a straight line through them: bytes per parameter, and a constant.

Memory is resident memory, not proportional shares: a volunteer's machine runs one peer, so libraries are not shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 1024 * 1024
GOAL_BYTES_PER_PARAMETER = 10.0
GOAL_CONSTANT_BYTES = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resident memory of one process, in bytes.

    Attributes:
        peak: maximum.
        steady: average during training.
    """

    peak: int
    steady: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFootprint:
    """Memory of a peer's process and, separately, of its libp2p daemon and other child processes."""

    peer: Footprint
    daemon: Footprint

    @property
    def peak(self) -> int:
        """Sum of both peaks, which need not occur at the same time."""
        return self.peer.peak + self.daemon.peak

    @property
    def steady(self) -> int:
        """Sum of both averages."""
        return self.peer.steady + self.daemon.steady


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """Measurements of one model size.

    Attributes:
        parameters: number of parameters.
        alone: the same training in a separate process.
        peers: all peers of the swarm, the founder first.
        num_rounds: rounds with entries, at the peer with the fewest.
        num_entries: applied entries, at the peer with the fewest.
        results_equal: whether all peers ended with the same φ and m.
    """

    parameters: int
    alone: Footprint
    peers: tuple[PeerFootprint, ...]
    num_rounds: int
    num_entries: int
    results_equal: bool

    @property
    def largest(self) -> PeerFootprint:
        """The peer with the highest peak."""
        return max(self.peers, key=lambda peer: peer.peak)

    @property
    def beyond(self) -> int:
        """Peak of the largest peer minus the peak of training alone, in bytes."""
        return self.largest.peak - self.alone.peak

    @property
    def beyond_steady(self) -> int:
        """Highest average of a peer minus the average of training alone, in bytes."""
        return max(peer.steady for peer in self.peers) - self.alone.steady

    @property
    def goal(self) -> int:
        """Bytes that a peer may hold beyond training."""
        return int(GOAL_BYTES_PER_PARAMETER * self.parameters) + GOAL_CONSTANT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Memory as a line: `slope` bytes per parameter plus `constant` bytes."""

    slope: float
    constant: float


def line_through(parameters: Sequence[int], held: Sequence[int]) -> Line | None:
    """Return the least-squares line through these points, or None for fewer than two sizes."""
    if len(set(parameters)) < 2:
        return None
    slope, constant = np.polyfit(np.array(parameters, dtype=np.float64), np.array(held, dtype=np.float64), 1)
    return Line(slope=float(slope), constant=float(constant))


def peak_line(sizes: Sequence[SizeFigures]) -> Line | None:
    """Return the line through the peaks beyond training."""
    return line_through([size.parameters for size in sizes], [size.beyond for size in sizes])


def steady_line(sizes: Sequence[SizeFigures]) -> Line | None:
    """Return the line through the averages beyond training."""
    return line_through([size.parameters for size in sizes], [size.beyond_steady for size in sizes])


def document_of(sizes: Sequence[SizeFigures], num_peers: int) -> dict[str, Any]:
    """Return the document for `--json`; slopes and constants are null if only one size was measured."""
    peak, steady = peak_line(sizes), steady_line(sizes)
    return {
        "peers": num_peers,
        "rows": [_row(size) for size in sizes],
        "slope_bytes_per_parameter": peak.slope if peak else None,
        "constant_mib": peak.constant / MIB if peak else None,
        "steady_slope_bytes_per_parameter": steady.slope if steady else None,
        "steady_constant_mib": steady.constant / MIB if steady else None,
    }


def _row(size: SizeFigures) -> dict[str, Any]:
    return {
        "parameters": size.parameters,
        "training_mib": size.alone.peak / MIB,
        "peer_mib": size.largest.peer.peak / MIB,
        "daemon_mib": size.largest.daemon.peak / MIB,
        "beyond_mib": size.beyond / MIB,
        "goal_mib": size.goal / MIB,
        "bytes_per_parameter_beyond": size.beyond / size.parameters,
        "steady_training_mib": size.alone.steady / MIB,
        "steady_beyond_mib": size.beyond_steady / MIB,
        "steady_bytes_per_parameter_beyond": size.beyond_steady / size.parameters,
        "rounds": size.num_rounds,
        "entries": size.num_entries,
        "results_equal": size.results_equal,
        "peers": [dataclasses.asdict(peer) for peer in size.peers],
    }
