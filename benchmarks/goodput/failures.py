"""The cost of the failure of one island to a swarm, measured in the simulator on the shipped peers.

An island that is drawn evenly is killed at an evenly drawn moment of a cycle. It is started again from its own disk
after a pause. Every member owns spans, contributes and leads in turn, so an even draw meets all roles as often as they
occur. Counted is the training that no entry names, whoever did it. The unit is an island-second: what one island trains
in a second without failures.

Besides single failures, a swarm is simulated in which failures keep coming, so that several islands are out at once.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.rules import RunRules
from simulator.island import TOKENS_PER_STEP
from simulator.network import OPEN
from simulator.run import run_rules
from simulator.scale import CODECS, STEP_SECONDS, standing_swarm
from simulator.simulation import Simulation, play

FRAGMENTS = 4
GROUP_SIZE = 16
HEARTBEATS_PER_ROUND = 2
STALLED_CYCLES = 3
CHECKPOINT_CYCLES = 4
WARM_UP_CYCLES = 5
WINDOW_CYCLES = 7
"""Cycles from one single failure to the next, of which the first is without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlan:
    """Options of a measurement.

    Attributes:
        islands: number of members that train; a bootstrap peer, which does not fail, is beside them.
        failures: number of single failures.
        pause_seconds: time from a failure until the island starts again.
        every_seconds: mean time between two failures in the swarm while failures keep coming.
        sustained_cycles: number of cycles measured meanwhile.
    """

    islands: int
    failures: int
    pause_seconds: float
    cycle_seconds: float
    every_seconds: float
    sustained_cycles: int
    seed: int = 0

    def rules(self) -> RunRules:
        """Return the rules of the run."""
        round_seconds = self.cycle_seconds / FRAGMENTS
        return run_rules(
            num_spans=(min(max(self.islands // 2, 2), GROUP_SIZE),) * FRAGMENTS,
            codecs=CODECS,
            group_size=GROUP_SIZE,
            stalled_cycles=STALLED_CYCLES,
            heartbeat_seconds=round_seconds / HEARTBEATS_PER_ROUND,
            round_seconds=round_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEntry:
    """The training that an entry names.

    Attributes:
        included: the members whose contributions are in it.
        trained_seconds: island-seconds of training that they named.
    """

    round: int
    included: frozenset[PeerId]
    trained_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure, and the rounds in which its effects are looked for.

    Attributes:
        returned: the round in which it started again.
        first, behind: the first of these rounds, and the one after the last.
    """

    peer: PeerId
    returned: int
    first: int
    behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """The cost of one failure.

    Attributes:
        lost_seconds: island-seconds of training that no entry names, the pause among them.
        others_seconds: the part of it that other islands trained.
        skipped_cycles: spans that got no entry, in cycles of all spans.
        stalled_rounds: rounds without any entry.
        rejoin_rounds: rounds from the return until the first entry that includes the island again; None: none did.
    """

    lost_seconds: float
    others_seconds: float
    skipped_cycles: float
    stalled_rounds: int
    rejoin_rounds: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one size of swarm.

    Attributes:
        costs: one for each single failure.
        sustained_failures, sustained_share: number of failures while they kept coming, and the share of all training
            that entries named meanwhile.
    """

    islands: int
    costs: tuple[FailureCost, ...]
    sustained_failures: int
    sustained_share: float


def measure_failures(plan: FailurePlan) -> Measured:
    """Simulate single failures, and then failures that keep coming.

    Raises:
        Violated: an invariant was broken.
    """
    num_failures, share = sustained_failures(plan)
    return Measured(
        islands=plan.islands,
        costs=single_failures(plan),
        sustained_failures=num_failures,
        sustained_share=share,
    )


def single_failures(plan: FailurePlan) -> tuple[FailureCost, ...]:
    """Simulate a swarm in which islands fail one after the other; return what each failure cost.

    Raises:
        Violated: an invariant was broken.
    """
    with _collected_at_the_end():
        return play(lambda: _single_failures(plan))


def sustained_failures(plan: FailurePlan) -> tuple[int, float]:
    """Simulate a swarm in which failures keep coming; return their number, and the share of all training that counted.

    Raises:
        Violated: an invariant was broken.
    """
    with _collected_at_the_end():
        return play(lambda: _sustained_failures(plan))


@contextmanager
def _collected_at_the_end() -> Iterator[None]:
    gc.disable()  # a swarm allocates much and frees it all at once
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


# -- the scenes


async def _single_failures(plan: FailurePlan) -> tuple[FailureCost, ...]:
    draw = random.Random(f"failures {plan.seed} {plan.islands}")
    failures = []
    async with _swarm(plan) as swarm:
        for number in range(plan.failures):
            first = WARM_UP_CYCLES + number * WINDOW_CYCLES
            name = _name(draw.randrange(plan.islands))
            await swarm.run_to((first + 1 + draw.random()) * plan.cycle_seconds)
            swarm.kill(name)
            await swarm.run(plan.pause_seconds)
            swarm.start(name)
            peer, returned = swarm.machines[name].peer, swarm.round
            rounds = (first * FRAGMENTS, (first + WINDOW_CYCLES) * FRAGMENTS)
            failures.append(Failure(peer=peer, returned=returned, first=rounds[0], behind=rounds[1]))
        await swarm.run_to((WARM_UP_CYCLES + plan.failures * WINDOW_CYCLES) * plan.cycle_seconds)
        entries = _counted(swarm)
        return tuple(cost_of(failure, entries, plan) for failure in failures)


async def _sustained_failures(plan: FailurePlan) -> tuple[int, float]:
    draw = random.Random(f"sustained {plan.seed} {plan.islands}")
    first, behind = WARM_UP_CYCLES, WARM_UP_CYCLES + plan.sustained_cycles
    num_failures = 0
    async with _swarm(plan) as swarm:

        def fail(name: str) -> None:
            nonlocal num_failures
            num_failures += 1
            swarm.kill(name)
            swarm.at(swarm.now + plan.pause_seconds, start, name)

        def start(name: str) -> None:
            swarm.start(name)
            swarm.at(swarm.now + draw.expovariate(1.0 / (plan.every_seconds * plan.islands)), fail, name)

        # Failures begin a few cycles early: the share is that of a swarm that is used to them.
        await swarm.run_to((first - 3) * plan.cycle_seconds)
        for number in range(plan.islands):
            start(_name(number))
        await swarm.run_to(first * plan.cycle_seconds)
        num_failures = 0
        await swarm.run_to(behind * plan.cycle_seconds)
        trained = trained_seconds(_counted(swarm), first * FRAGMENTS, behind * FRAGMENTS)
    return num_failures, trained / (plan.islands * plan.sustained_cycles * plan.cycle_seconds)


def _swarm(plan: FailurePlan) -> Simulation:
    return standing_swarm(
        plan.rules(),
        {_name(number): OPEN for number in range(plan.islands)},
        draw=random.Random(f"starts {plan.seed}"),
        seed=plan.seed,
        checkpoint_seconds=CHECKPOINT_CYCLES * plan.cycle_seconds,
        with_bootstrap=True,
    )


def _name(number: int) -> str:
    return f"p{number}"


def _counted(swarm: Simulation) -> list[CountedEntry]:
    """Return what all entries that were absorbed say."""
    rosters, num_spans = swarm.inspector.rosters, sum(swarm.rules.num_spans)
    found = []
    for entry in swarm.inspector.entries.values():
        bits = int.from_bytes(entry.included, "little")
        members = rosters[entry.roster].members
        included = frozenset(member.peer for at, member in enumerate(members) if bits >> at & 1)
        steps = entry.tokens / TOKENS_PER_STEP
        found.append(
            CountedEntry(round=entry.round, included=included, trained_seconds=steps * STEP_SECONDS / num_spans)
        )
    return found


# -- the arithmetic


def cost_of(failure: Failure, entries: Iterable[CountedEntry], plan: FailurePlan) -> FailureCost:
    """Return what a failure cost, from all entries of a swarm of equal islands.

    Each entry counts as one span of a cycle, since spans are equally long.
    """
    rules = plan.rules()
    spans = sum(rules.num_spans)
    seen = [entry for entry in entries if failure.first <= entry.round < failure.behind]
    num_cycles = (failure.behind - failure.first) / FRAGMENTS
    others = sum(len(entry.included - {failure.peer}) for entry in seen)
    again = [e.round for e in seen if e.round >= failure.returned and failure.peer in e.included]
    return FailureCost(
        lost_seconds=plan.islands * num_cycles * plan.cycle_seconds
        - trained_seconds(seen, failure.first, failure.behind),
        others_seconds=((plan.islands - 1) * num_cycles - others / spans) * plan.cycle_seconds,
        skipped_cycles=num_cycles - len(seen) / spans,
        stalled_rounds=failure.behind - failure.first - len({entry.round for entry in seen}),
        rejoin_rounds=min(again) - failure.returned if again else None,
    )


def trained_seconds(entries: Iterable[CountedEntry], first: int, behind: int) -> float:
    """Return the island-seconds that the entries of some rounds name."""
    return sum(entry.trained_seconds for entry in entries if first <= entry.round < behind)


def measured_row(plan: FailurePlan, measured: Measured) -> dict[str, Any]:
    """Return the row of a size of swarm: means over its single failures, and failures that keep coming.

    `expected_share` is what would have counted if each of the failures that kept coming had cost as much as a single
    one. Less has counted where failures met.
    """
    costs = measured.costs
    lost = [cost.lost_seconds for cost in costs]
    again = [cost.rejoin_rounds for cost in costs if cost.rejoin_rounds is not None]
    trained = plan.islands * plan.sustained_cycles * plan.cycle_seconds
    return {
        "islands": plan.islands,
        "failures": len(costs),
        "lost_seconds": round(mean(lost), 3),
        "lost_seconds_error": round(stdev(lost) / math.sqrt(len(lost)), 3) if len(lost) > 1 else None,
        "others_seconds": round(mean(cost.others_seconds for cost in costs), 3),
        "skipped_cycles": round(mean(cost.skipped_cycles for cost in costs), 4),
        "stalled_rounds": round(mean(cost.stalled_rounds for cost in costs), 3),
        "rejoin_rounds": round(mean(again), 2) if again else None,
        "most_rejoin_rounds": max(again, default=None),
        "not_rejoined": len(costs) - len(again),
        "sustained_cycles": plan.sustained_cycles,
        "sustained_failures": measured.sustained_failures,
        "sustained_share": round(measured.sustained_share, 4),
        "expected_share": round(1.0 - measured.sustained_failures * mean(lost) / trained, 4),
    }
