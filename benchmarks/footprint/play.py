"""Measurement of peers that train models of several sizes, and of the same training alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.footprint.figures import Footprint, PeerFootprint, SizeFigures
from benchmarks.footprint.shapes import shape_of
from benchmarks.memory_watch import MemoryWatch
from benchmarks.new_run import order_of_new_run
from benchmarks.worker_pool import WorkerPool

PEER, ALONE = "footprint.peer:SwarmPeer", "footprint.training:TrainingAlone"
FRAGMENTS = 4
ROUNDS_FIRST = 2
"""Number of rounds with entries before averaging begins."""
ROUNDS_MORE = FRAGMENTS
STEPS_ALONE = 12
WARM_STEPS = 3
_SHORTEST_ROUND_SECONDS = 8.0
_ROUND_SECONDS_PER_PARAMETER = 1.2e-7
"""Round time per parameter and peer, on a busy machine with two cores; a step must fit into half a round."""
_START_SECONDS, _SECONDS_PER_PARAMETER = 180.0, 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintPlan:
    """The measurements to make: the number of peers, and approximate model sizes, measured one after the other."""

    num_peers: int
    parameters: tuple[int, ...]

    def round_seconds(self, parameters: int) -> float:
        """Return a round length that fits the work of all peers."""
        return max(_SHORTEST_ROUND_SECONDS, _ROUND_SECONDS_PER_PARAMETER * parameters * self.num_peers)

    def patience_seconds(self, parameters: int) -> float:
        """Return the timeout of an answer, many times the expected time."""
        return _START_SECONDS + _SECONDS_PER_PARAMETER * parameters + 20.0 * self.round_seconds(parameters)


def measure_footprints(plan: FootprintPlan, show: Callable[[str], None]) -> tuple[SizeFigures, ...]:
    """Measure each size.

    Args:
        show: called with progress messages.
    Raises:
        PeerError, StateError, NetworkError: a process ended, failed or timed out; all processes are stopped.
    """
    return tuple(_measure(plan, parameters, show) for parameters in plan.parameters)


def _measure(plan: FootprintPlan, parameters: int, show: Callable[[str], None]) -> SizeFigures:
    size = shape_of(parameters).num_parameters
    orders = orders_of(plan, parameters)
    patience = plan.patience_seconds(parameters)
    with _scratch_folder() as root, WorkerPool("training", orders[:1], root, worker=ALONE) as pool:
        show(f"{size:,} parameters: training alone")
        alone = _train_alone(pool, patience)
    with _scratch_folder() as root, WorkerPool("peer", orders, root, worker=PEER) as pool:
        show(f"{size:,} parameters: {plan.num_peers} peers, rounds of {plan.round_seconds(parameters):.0f} s")
        peers, ends = _train_together(pool, patience)
    return SizeFigures(
        parameters=size,
        alone=alone,
        peers=peers,
        num_rounds=min(end["rounds"] for end in ends),
        num_entries=min(end["entries"] for end in ends),
        results_equal=len({end["digest"] for end in ends}) == 1 and bool(ends[0]["digest"]),
    )


def _train_alone(pool: WorkerPool, patience: float) -> Footprint:
    with MemoryWatch(pool.pids_by_peer) as watch:
        pool.ask({"do": "train", "steps": WARM_STEPS}, patience)
        watch.begin_average()
        pool.ask({"do": "train", "steps": STEPS_ALONE}, patience)
        steady = watch.averages()[0]
        pool.ask({"do": "evaluate"}, patience)
        watch.look()
        return Footprint(peak=watch.peaks()[0], steady=steady)


def _train_together(pool: WorkerPool, patience: float) -> tuple[tuple[PeerFootprint, ...], list[dict[str, Any]]]:
    with MemoryWatch(lambda: _processes_apart(pool)) as watch:
        invite = pool.ask({"do": "found", "seconds": patience}, patience)[0]["invite"]
        pool.ask({"do": "join", "invite": invite}, patience)
        pool.ask({"do": "exchange", "rounds": ROUNDS_FIRST, "seconds": patience}, patience)
        watch.begin_average()
        standing = pool.ask({"do": "exchange", "rounds": ROUNDS_FIRST + ROUNDS_MORE, "seconds": patience}, patience)
        steady = watch.averages()
        last_round = max(answer["round"] for answer in standing) + 1
        ends = pool.ask({"do": "finish", "last_round": last_round, "seconds": patience}, patience)
        watch.look()
        held = [Footprint(peak=peak, steady=mean) for peak, mean in zip(watch.peaks(), steady, strict=True)]
    pairs = zip(held[::2], held[1::2], strict=True)
    return tuple(PeerFootprint(peer=peer, daemon=daemon) for peer, daemon in pairs), ends


def _processes_apart(pool: WorkerPool) -> list[Sequence[int]]:
    """Return two groups per peer: its process, and its children (the daemon, and a shell that cleans up)."""
    return [group for pids in pool.pids_by_peer() for group in (pids[:1], pids[1:])]


def orders_of(plan: FootprintPlan, parameters: int) -> list[dict[str, Any]]:
    """Return the first message for each peer: the signed manifest of a run of this size, and the organiser's key."""
    shape, round_seconds = shape_of(parameters), plan.round_seconds(parameters)
    order = order_of_new_run(
        {
            "model": {
                "layers": shape.layers,
                "width": shape.width,
                "heads": shape.heads,
                "feed_forward": shape.feed_forward,
                "context": shape.context,
            },
            # Not Muon: with so few tokens, orthogonalisation would be most of a step, and rounds would be late.
            "inner": {"step_tokens": shape.context, "optimizer": "adamw", "learning_rate": 1e-3},
            "rounds": {"round_seconds": round_seconds, "fragments": FRAGMENTS},
        }
    )
    return [order] * plan.num_peers


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    # The name must be short: the daemons' sockets are in this folder, and a socket path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
