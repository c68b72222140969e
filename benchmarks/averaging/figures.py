"""Figures of all turns: medians with quartiles, ratios within each repeat, and the document for `--json`.

Figures from a shared machine are noisy. The ratio of two systems whose turns follow each other directly is less noisy.
A ratio here is the median, over all repeats, of the ratios within a repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.averaging.systems import OURS
from benchmarks.interleaved import Spread, spread_of

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange of one system.

    Attributes:
        wall_seconds: from the start until the last peer has applied its outer step.
        cpu_seconds: CPU time of all processes of all peers, user and system.
        wire_bytes: bytes sent over the network interface by all peers, including headers and acknowledgements.
        peak_rss_bytes: sum of the peaks of resident memory of a peer's processes; of the peer with the largest sum.
        others_cpu_seconds: CPU time of the waiting processes of other systems during the turn.
        results_equal: whether all peers ended with the same bytes.
    """

    wall_seconds: float
    cpu_seconds: float
    wire_bytes: int
    peak_rss_bytes: int
    others_cpu_seconds: float
    results_equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All measured turns by system, in order of repeats, and their settings.

    Attributes:
        on_own_network: whether each system had a private network, so that no other traffic was counted.
        kept_alive: whether all processes ran until the end; otherwise each system's were started for its turn.
        num_cores: number of cores available.
    """

    num_peers: int
    parameters: int
    codec: str
    turns: Mapping[str, Sequence[Turn]]
    on_own_network: bool
    kept_alive: bool
    num_cores: int

    @property
    def repeats(self) -> int:
        """Number of turns of each system."""
        return len(next(iter(self.turns.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFigures:
    """Figures of one system with quartiles; CPU time and bytes are per parameter and peer."""

    wall_seconds: Spread
    cpu_ns_per_parameter_per_peer: Spread
    wire_bytes_per_parameter_per_peer: Spread
    peak_rss_mib: Spread
    results_equal: bool


MEASURED = ("wall_seconds", "cpu_ns_per_parameter_per_peer", "wire_bytes_per_parameter_per_peer", "peak_rss_mib")


def figures_of(comparison: Comparison, system: str) -> SystemFigures:
    """Return the figures of one system."""
    spreads = {
        name: spread_of([_figure(comparison, turn, name) for turn in comparison.turns[system]]) for name in MEASURED
    }
    return SystemFigures(**spreads, results_equal=all(turn.results_equal for turn in comparison.turns[system]))


def ratios_to_ours(comparison: Comparison, system: str) -> dict[str, Spread]:
    """Return a system's figures divided by ours: median and quartiles of the ratios within each repeat."""
    pairs = list(zip(comparison.turns[system], comparison.turns[OURS], strict=True))
    return {
        name: spread_of([_figure(comparison, theirs, name) / _figure(comparison, ours, name) for theirs, ours in pairs])
        for name in MEASURED
    }


def idle_cores(comparison: Comparison) -> float:
    """Return the average number of cores used by waiting processes, which may have disturbed the turns of others."""
    turns = [turn for played in comparison.turns.values() for turn in played]
    return sum(turn.others_cpu_seconds for turn in turns) / sum(turn.wall_seconds for turn in turns)


def document_of(comparison: Comparison) -> dict[str, Any]:
    """Return the document for `--json`: medians under their old names; spreads and ratios under separate keys."""
    figures = {system: figures_of(comparison, system) for system in comparison.turns}
    return {
        "peers": comparison.num_peers,
        "parameters": comparison.parameters,
        "repeats": comparison.repeats,
        "codec": comparison.codec,
        "cores": comparison.num_cores,
        "own_network": comparison.on_own_network,
        "processes_kept_alive": comparison.kept_alive,
        "idle_cores": idle_cores(comparison),
        "systems": {system: _system_document(figures[system]) for system in comparison.turns},
        "ratios": {
            system: {name: dataclasses.asdict(spread) for name, spread in ratios_to_ours(comparison, system).items()}
            for system in comparison.turns
            if system != OURS
        },
        "turns": {system: [dataclasses.asdict(turn) for turn in played] for system, played in comparison.turns.items()},
    }


def _system_document(figures: SystemFigures) -> dict[str, Any]:
    medians = {name: getattr(figures, name).middle for name in MEASURED}
    quartiles = {name: dataclasses.asdict(getattr(figures, name)) for name in MEASURED}
    return {**medians, "results_equal": figures.results_equal, "spread": quartiles}


def _figure(comparison: Comparison, turn: Turn, name: str) -> float:
    shares = comparison.parameters * comparison.num_peers
    match name:
        case "wall_seconds":
            return turn.wall_seconds
        case "cpu_ns_per_parameter_per_peer":
            return turn.cpu_seconds * 1e9 / shares
        case "wire_bytes_per_parameter_per_peer":
            return turn.wire_bytes / shares
        case _:
            return turn.peak_rss_bytes / MIB
