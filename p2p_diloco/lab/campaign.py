"""Many seeds at once: one process for each core, and one line of sums at the end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from p2p_diloco.lab.cores import end_with_parent, usable_cores
from p2p_diloco.lab.faults import FaultKind
from p2p_diloco.lab.mistakes import Mistake
from p2p_diloco.lab.scenario import draw_scenario
from p2p_diloco.lab.trial import TrialResult, play

SEEDS_OF_ONE_TASK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """What is played.

    Attributes:
        peers: fewest and most in a swarm.
        faults: what may befall them.
        mistake: planted, to see that it is caught.
    """

    peers: tuple[int, int]
    faults: frozenset[FaultKind]
    mistake: Mistake | None = None

    def play(self, seed: int, *, with_trace: bool = False) -> TrialResult:
        """Play one seed here."""
        return play(draw_scenario(seed, self.peers, self.faults), mistake=self.mistake, with_trace=with_trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """What came of all seeds.

    Attributes:
        seeds: how many were played.
        failing: those that broke a promise, in order of seeds, with the trace left out.
        seconds: wall time.
    """

    seeds: int
    failing: tuple[TrialResult, ...]
    seconds: float

    @property
    def violations(self) -> int:
        """How many promises were broken: a seed ends with its first."""
        return len(self.failing)


def run_campaign(plan: CampaignPlan, seeds: Sequence[int], *, processes: int | None = None) -> CampaignResult:
    """Play all seeds.

    Args:
        processes: as many at once; one for each core it may use unless given. 1: in this process.
    """
    began = time.monotonic()
    failing = sorted((r for r in _results(plan, seeds, processes) if r.invariant is not None), key=lambda r: r.seed)
    return CampaignResult(seeds=len(seeds), failing=tuple(failing), seconds=time.monotonic() - began)


def _results(plan: CampaignPlan, seeds: Sequence[int], processes: int | None) -> Iterator[TrialResult]:
    processes = processes if processes is not None else usable_cores()
    tasks = [tuple(seeds[at : at + SEEDS_OF_ONE_TASK]) for at in range(0, len(seeds), SEEDS_OF_ONE_TASK)]
    if processes == 1:
        for task in tasks:
            yield from _play_task(plan, task)
        return
    with ProcessPoolExecutor(min(processes, len(tasks)), initializer=end_with_parent) as pool:
        for results in pool.map(_play_task, [plan] * len(tasks), tasks):
            yield from results


def _play_task(plan: CampaignPlan, seeds: tuple[int, ...]) -> list[TrialResult]:
    """Play a few seeds; the collector waits for the end of each, since a swarm makes much and drops all at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        results = []
        for seed in seeds:
            results.append(plan.play(seed))
            gc.collect()
        return results
    finally:
        if was_enabled:
            gc.enable()
