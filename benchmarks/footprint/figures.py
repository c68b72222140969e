"""The measurements of each size, and a straight line through them: bytes per parameter, and a constant.

Resident memory, not shares of it: a volunteer's machine runs one peer, which has nobody to share libraries with.
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
        peak: the most it ever held.
        steady: what it held on average while it trained.
    """

    peak: int
    steady: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFootprint:
    """A peer's process and, told apart, its libp2p daemon with what else it has started."""

    peer: Footprint
    daemon: Footprint

    @property
    def peak(self) -> int:
        """The sum of both peaks, which need not come together."""
        return self.peer.peak + self.daemon.peak

    @property
    def steady(self) -> int:
        """Both on average."""
        return self.peer.steady + self.daemon.steady


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """One size of model.

    Attributes:
        parameters: of the model.
        alone: the same training in a process of its own.
        peers: each peer of the swarm; the founder is the first.
        num_rounds: rounds with entries, at the peer that saw the fewest.
        num_entries: entries that were applied, at the peer that saw the fewest.
        results_equal: whether all ended with the same φ and m.
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
        """Bytes at the peak of the largest peer, beyond the peak of training alone."""
        return self.largest.peak - self.alone.peak

    @property
    def beyond_steady(self) -> int:
        """Bytes of the peer that holds most on average, beyond training alone."""
        return max(peer.steady for peer in self.peers) - self.alone.steady

    @property
    def goal(self) -> int:
        """Bytes that a peer may hold beyond training."""
        return int(GOAL_BYTES_PER_PARAMETER * self.parameters) + GOAL_CONSTANT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes as `slope` for each parameter and `constant` beside."""

    slope: float
    constant: float


def line_through(parameters: Sequence[int], held: Sequence[int]) -> Line | None:
    """Return the straight line nearest to these points by least squares; None for fewer than two sizes."""
    if len(set(parameters)) < 2:
        return None
    slope, constant = np.polyfit(np.array(parameters, dtype=np.float64), np.array(held, dtype=np.float64), 1)
    return Line(slope=float(slope), constant=float(constant))


def peak_line(sizes: Sequence[SizeFigures]) -> Line | None:
    """Return the line through what peers hold beyond training at their peaks."""
    return line_through([size.parameters for size in sizes], [size.beyond for size in sizes])


def steady_line(sizes: Sequence[SizeFigures]) -> Line | None:
    """Return the line through what they hold beyond training on average."""
    return line_through([size.parameters for size in sizes], [size.beyond_steady for size in sizes])


def document_of(sizes: Sequence[SizeFigures], num_peers: int) -> dict[str, Any]:
    """Return what `--json` writes; slopes and constants are null where only one size was measured."""
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
