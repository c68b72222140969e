"""Cut a swarm in two: for a short time, unevenly, and for so long that both halves continue alone."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.protocol.round.chain import heads_digest
from simulator.inspector import Violated
from simulator.scale import CYCLE_SECONDS, FRAGMENTS, ROUND_SECONDS, scale_swarm
from simulator.simulation import Simulation, play

SETTLE_CYCLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """The result of one split.

    Attributes:
        peers: number of members before the split; `share` of them are on the smaller side.
        cycles: length of the split.
        degraded: largest number of rosters without a majority on either side at its end; 0: neither side continued
            without one.
        branches: number of certified rosters of the same height that the two sides held at its end; 1: no fork.
        reports: number of peers that reported that they were cut off.
        healed_cycles: cycles after its end until all were members of one roster, had a new entry and held the same
            bytes; None: never.
        chains: largest number of different chains of a span at the end; 1: the state of one side won as a whole.
        kept_its_promise: healed within two cycles of its end, or within four for a fork; no fork before the first
            threshold; one chain for every span, that of one side alone.
    """

    peers: int
    share: float
    cycles: float
    degraded: int
    branches: int
    reports: int
    healed_cycles: float | None
    chains: int
    kept_its_promise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The two sides of a split, and its length."""

    peers: int
    share: float
    cycles: float
    may_fork: bool
    seed: int


def splits_of(num_peers: int, seed: int = 0) -> tuple[SplitPlan, ...]:
    """Return the three splits.

    Two are shorter than the first threshold: half from half, and a tenth from the rest. The third is half from half for
    longer.
    """
    return (
        SplitPlan(peers=num_peers, share=0.5, cycles=3.0, may_fork=False, seed=seed),
        SplitPlan(peers=num_peers, share=0.1, cycles=5.0, may_fork=False, seed=seed),
        SplitPlan(peers=num_peers, share=0.5, cycles=14.0, may_fork=True, seed=seed),
    )


def play_split(plan: SplitPlan) -> SplitRow:
    """Run one split to its end.

    Raises:
        Violated: an invariant was broken.
    """

    async def scene() -> SplitRow:
        async with scale_swarm(plan.peers, seed=plan.seed) as swarm:
            return await _played(swarm, plan)

    return play(scene)


async def _played(swarm: Simulation, plan: SplitPlan) -> SplitRow:
    await swarm.run_to((1 + SETTLE_CYCLES) * CYCLE_SECONDS - ROUND_SECONDS / 3)
    names = sorted(swarm.machines)
    swarm.rng.shuffle(names)
    smaller = max(1, round(plan.share * len(names)))
    swarm.partition(names[:smaller], names[smaller:])
    await swarm.run(plan.cycles * CYCLE_SECONDS)
    rosters = [machine.roster for machine in swarm.running()]
    degraded = max(machine.running.book.num_degraded() for machine in swarm.running())
    highest = [{r.digest() for r in rosters if r.k == k} for k in {r.k for r in rosters}]
    branches = max(len(digests) for digests in highest) if degraded == 0 else len({r.digest() for r in rosters})
    reports = sum("split" in machine.topics for machine in swarm.running())
    swarm.heal()
    healed = await _cycles_until_whole(swarm, 8.0)
    chains = _most_chains(swarm)
    allowed = 4.0 if degraded else 2.0
    has_healed = healed is not None and healed <= allowed
    kept = has_healed and chains == 1 and (plan.may_fork or (degraded == 0 and branches == 1)) and reports > 0
    return SplitRow(
        peers=plan.peers,
        share=plan.share,
        cycles=plan.cycles,
        degraded=degraded,
        branches=branches,
        reports=reports,
        healed_cycles=healed,
        chains=chains,
        kept_its_promise=kept,
    )


async def _cycles_until_whole(swarm: Simulation, most_cycles: float) -> float | None:
    heights = {machine.name: machine.height() for machine in swarm.running()}

    def is_whole() -> bool:
        """Return whether all peers continue together."""
        goes_on = all(machine.height() > heights[machine.name] for machine in swarm.running())
        return goes_on and swarm.all_members() and swarm.agreed()

    try:
        seconds = await swarm.until(is_whole, most_cycles * CYCLE_SECONDS, step=CYCLE_SECONDS / 32)
    except Violated as broken:
        if broken.invariant != "claim":
            raise
        return None
    return seconds / CYCLE_SECONDS


def _most_chains(swarm: Simulation) -> int:
    """Return the largest number of different states that any fragment has among all peers."""
    return max(
        len(
            {
                heads_digest([state.head for span, state in sorted(m.vectors.states.items()) if span.fragment == f])
                for m in swarm.running()
            }
        )
        for f in range(FRAGMENTS)
    )
