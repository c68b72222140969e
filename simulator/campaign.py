"""Run many seeds in parallel, one process per core, and sum up the results."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulator.cores import end_with_parent, usable_cores
from simulator.scenario import draw_scenario
from simulator.trial import TrialResult, play_scenario

SEEDS_OF_ONE_TASK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """Options of a campaign.

    Attributes:
        peers: smallest and largest size of a swarm.
        kinds: kinds of trouble that may occur.
        mistake: name of a mistake to plant, to check that it is caught.
    """

    peers: tuple[int, int]
    kinds: frozenset[str]
    mistake: str | None = None

    def play(self, seed: int, *, with_trace: bool = False) -> TrialResult:
        """Run one seed in this process."""
        from simulator.mistakes import MISTAKES

        mistake = MISTAKES[self.mistake] if self.mistake is not None else None
        return play_scenario(draw_scenario(seed, self.peers, self.kinds), mistake=mistake, with_trace=with_trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """The results of all seeds.

    Attributes:
        seeds: number of seeds.
        failing: results of the seeds that broke an invariant, in order of seed, without traces.
        checks, skipped: number of checks, and how many of them could not be made.
        seconds: wall time.
    """

    seeds: int
    failing: tuple[TrialResult, ...]
    checks: int
    skipped: int
    seconds: float

    @property
    def skipped_share(self) -> float:
        """Return the share of checks that could not be made."""
        return self.skipped / self.checks if self.checks else 0.0


def run_campaign(plan: CampaignPlan, seeds: Sequence[int], *, processes: int | None = None) -> CampaignResult:
    """Run all seeds.

    Args:
        processes: number of worker processes; one per usable core by default. With 1, all seeds run in this process.
    """
    began = time.monotonic()
    results = list(_results(plan, seeds, processes))
    failing = sorted((result for result in results if result.invariant is not None), key=lambda result: result.seed)
    return CampaignResult(
        seeds=len(seeds),
        failing=tuple(failing),
        checks=sum(result.checks for result in results),
        skipped=sum(result.skipped for result in results),
        seconds=time.monotonic() - began,
    )


def first_catch(plan: CampaignPlan, seeds: Sequence[int]) -> TrialResult | None:
    """Run seeds in this process until one breaks an invariant; return None if none does."""
    for seed in seeds:
        (result,) = _play_task(plan, (seed,))
        if result.invariant is not None:
            return result
    return None


def _results(plan: CampaignPlan, seeds: Sequence[int], processes: int | None) -> Iterator[TrialResult]:
    processes = processes if processes is not None else usable_cores()
    tasks = [tuple(seeds[at : at + SEEDS_OF_ONE_TASK]) for at in range(0, len(seeds), SEEDS_OF_ONE_TASK)]
    if processes == 1 or len(tasks) == 1:
        for task in tasks:
            yield from _play_task(plan, task)
        return
    with ProcessPoolExecutor(min(processes, len(tasks)), initializer=end_with_parent) as pool:
        for results in pool.map(_play_task, [plan] * len(tasks), tasks):
            yield from results


def _play_task(plan: CampaignPlan, seeds: tuple[int, ...]) -> list[TrialResult]:
    """Run a few seeds. Garbage is collected only after each: a swarm allocates much and frees it all at once."""
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
