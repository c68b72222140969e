"""Cut a swarm in two: for a while, unevenly, and for so long that both halves go on alone."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.protocol.round.chain import heads_digest
from p2p_diloco.testing.inspector import Violated
from p2p_diloco.testing.scale import CYCLE_SECONDS, FRAGMENTS, ROUND_SECONDS, scale_swarm
from p2p_diloco.testing.simulation import Simulation, play

SETTLE_CYCLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """The result of one split.

    Attributes:
        peers: members before the split; `share` of them on the smaller side.
        cycles: how long the split lasted.
        degraded: most rosters without a majority on either side when it ended; 0: nobody went on without one.
        branches: certified rosters of the same height that the two sides held when it ended: 1 means no fork.
        reports: peers that said they were cut off.
        healed_cycles: after its end, until all were members of one roster, had a new entry and held the same bytes;
            None: never.
        chains: different chains of any span left at the end: 1 means that one side's state won, as a whole.
        kept_its_promise: healed within two cycles of its end, or for a fork within four; no fork but after the
            first threshold; one chain for every span, and that of one side alone.
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

    Half from half and a tenth from the rest for fewer cycles than the first threshold, and half from half for longer.
    """
    return (
        SplitPlan(peers=num_peers, share=0.5, cycles=3.0, may_fork=False, seed=seed),
        SplitPlan(peers=num_peers, share=0.1, cycles=5.0, may_fork=False, seed=seed),
        SplitPlan(peers=num_peers, share=0.5, cycles=14.0, may_fork=True, seed=seed),
    )


def play_split(plan: SplitPlan) -> SplitRow:
    """Play one split to its end.

    Raises:
        Violated: an invariant was broken on the way.
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
        """Return whether all go on together."""
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
    """Return the most different states that any fragment has among all peers."""
    return max(
        len(
            {
                heads_digest([state.head for span, state in sorted(m.vectors.states.items()) if span.fragment == f])
                for m in swarm.running()
            }
        )
        for f in range(FRAGMENTS)
    )
