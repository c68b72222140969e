"""One seed, from its scenario to its result: a time of troubles, a quiet time, and the checks in both."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from p2p_diloco.node.clock_sync import SLOWEST
from simulator.inspector import Violated
from simulator.liveness import (
    ASKED_AGAIN_SECONDS,
    KNOWN_AFTER_SECONDS,
    REDIAL_SECONDS,
    SETTLE_SECONDS,
    check_agreement,
    check_included,
    check_memory,
    check_ready,
    check_tables,
    cycles_until_it_goes_on,
    fragment_heights,
    is_one_line,
    leading_roster,
    newest_degraded,
    still_names_dead,
)
from simulator.network import OPEN, Ways
from simulator.run import ROUND_ZERO, codecs_of, run_rules
from simulator.scenario import BOOTSTRAP, Scenario
from simulator.simulation import START_SECONDS, Simulation, play
from simulator.trace import LINES_KEPT, Trace
from simulator.troubles import Trouble

if TYPE_CHECKING:
    from simulator.mistakes import Mistake

QUIET_CYCLES = 2
MOST_DEGRADED = 4
"""Maximum number of consecutive degraded rosters to wait for before agreement is checked."""
MOST_NEW_ROSTERS = 12
LONGEST_SLEW_SECONDS = 3600.0
"""Maximum time for clocks to converge; enough for the largest error that a trouble gives an honest clock."""
CLOCK_PATIENCE_SECONDS = 120.0
"""Time after which peers whose clocks are apart settle on one."""
BEFORE_THE_BORDER_SECONDS = 0.6
"""Time before the end of a cycle at which it is checked; clocks are right to within less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of one seed.

    Attributes:
        invariant: the first invariant that was broken; None: all held.
        text: how it was broken; empty if all held.
        trace: all that happened, for people; empty unless requested.
        tail: the last lines of the trace about the machine that broke an invariant; empty unless one was broken.
        checks, skipped: number of checks, and how many of them could not be made.
        digest: digest of all that peers hold at the end; the same seed gives the same digest on every machine.
        seconds: CPU time of this process.
    """

    seed: int
    num_peers: int
    num_entries: int
    checks: int
    skipped: int
    seconds: float
    digest: str
    invariant: str | None = None
    text: str = ""
    trace: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()


class Trial:
    """Runs one scenario in a simulation."""

    def __init__(self, scenario: Scenario, swarm: Simulation) -> None:
        self.scenario = scenario
        self.swarm = swarm
        self._followed = -1
        """The cycle of the newest degraded roster that all peers have had time to follow."""
        self._has_waited_for_restored = False

    async def play(self) -> None:
        """Run the scenario to its end.

        Raises:
            Violated: an invariant is broken.
        """
        swarm, scenario = self.swarm, self.scenario
        self._set_up()
        for trouble in scenario.troubles:
            swarm.at(trouble.at, self._begin, trouble)
            if not trouble.is_for_good:
                swarm.at(trouble.until, self._end, trouble)
        await swarm.run_to(scenario.bad_until + 1e-3)
        self._end_troubles()
        await self._quiet()

    def _set_up(self) -> None:
        swarm = self.swarm
        if self.scenario.bootstrap:
            swarm.add(BOOTSTRAP, trains=False, founds=True)
        for place, peer in enumerate(self.scenario.peers):
            founds = place == 0 and not self.scenario.bootstrap
            swarm.add(
                peer.name,
                place=peer.place,
                founds=founds,
                step_seconds=peer.step_seconds,
                wall_offset=peer.wall_offset,
                drift=peer.drift,
                start=founds,
            )
            if not founds:
                swarm.at(max(peer.starts_at, START_SECONDS - ROUND_ZERO), self.swarm.start, peer.name)

    def _begin(self, trouble: Trouble) -> None:
        if self.swarm.broken is None:
            self.swarm.note(None, "begins", trouble.describe())
            trouble.begin(self.swarm)

    def _end(self, trouble: Trouble) -> None:
        if self.swarm.broken is None:
            self.swarm.note(None, "ends", trouble.describe())
            trouble.end(self.swarm)

    def _end_troubles(self) -> None:
        """End all troubles. Machines that are dead for good stay dead, unless no other can be dialled."""
        swarm = self.swarm
        swarm.note(None, "troubles end", "")
        swarm.network.trouble = Ways()
        swarm.heal()
        dead = {name for trouble in self.scenario.troubles if trouble.leaves_dead for name in trouble.names}
        for name, machine in swarm.machines.items():
            swarm.go_on(name)
            machine.disk.is_full = False
            if not machine.runs and name not in dead:
                swarm.start(name)
        for name, machine in swarm.machines.items():
            if not machine.runs and not any(m.runs and m.place == OPEN for m in swarm.machines.values()):
                swarm.start(name)

    async def _quiet(self) -> None:
        swarm, cycle = self.swarm, self.scenario.cycle_seconds
        await swarm.run(SETTLE_SECONDS)
        if self._may_wait_for_what_was_lost():
            await swarm.run(ASKED_AGAIN_SECONDS)
        if not self._are_linked():
            await swarm.run(REDIAL_SECONDS)
        await self._until_the_living_are_members()
        await self._until_outsiders_are_known()
        swarm.inspector.checks += 1
        if not await self._are_clocks_slewed():
            self._skip_quiet_checks()
            return
        self._followed = newest_degraded(swarm)
        await self._run_to_end_of_cycle(swarm.now + QUIET_CYCLES * cycle)
        await self._check_agreement()
        before, first_round = fragment_heights(swarm), swarm.round + 1
        await self._run_to_end_of_cycle(swarm.now + cycle)
        await self._check_agreement()
        await self._goes_on(before)
        check_included(swarm, first_round)
        check_tables(swarm)
        for _ in range(2 * self.scenario.scrub_cycles + 2):
            if not swarm.inspector.differing:
                return
            await self._run_to_end_of_cycle(swarm.now + cycle)
        check_memory(swarm)

    def _skip_quiet_checks(self) -> None:
        """Count the check of the clocks, and each check that the quiet time would have made at least, as skipped."""
        swarm = self.swarm
        agreements = 2 * max(len(swarm.honest()) - 1, 0)
        others = 1 + len(swarm.running(trains=False)) + len(swarm.inspector.differing)
        swarm.inspector.checks += agreements + others
        swarm.inspector.skipped += 1 + agreements + others

    def _are_linked(self) -> bool:
        """Return whether all running machines have the links they want to machines that can be dialled."""
        swarm = self.swarm
        running = swarm.running(trains=False)
        for one in running:
            for other in running:
                if other is one or not swarm.network.can_dial(one.peer, other.peer):
                    continue
                wanted = one.running.wanted_links([m.peer for m in running])
                if other.peer not in one.running.linked and (wanted is None or other.peer in wanted):
                    return False
        return True

    async def _until_the_living_are_members(self) -> None:
        """If most members of the roster are dead, wait out the stalled cycles, then those in which it shrinks."""
        if not still_names_dead(self.swarm):
            return
        for _ in range(cycles_until_it_goes_on(self.swarm) or 0):
            await self._run_to_end_of_cycle(self.swarm.now + self.scenario.cycle_seconds)
            roster = leading_roster(self.swarm)
            if roster is None or all(
                self.swarm.by_peer[m.peer].runs for m in roster.members if m.peer in self.swarm.by_peer
            ):
                return

    async def _until_outsiders_are_known(self) -> None:
        """After each new member, wait until reducers of a home network know whether it is there too.

        Until then it gets what they averaged from others, and later.
        """
        swarm = self.swarm
        for _ in range(MOST_NEW_ROSTERS if swarm.network.lans else 0):
            roster, clock = leading_roster(swarm), swarm.rules.clock
            seconds = swarm.loop.true_seconds() - clock.begin(roster.cycle * clock.num_fragments) if roster else 0.0
            if seconds > KNOWN_AFTER_SECONDS:
                return
            await swarm.run(self.scenario.cycle_seconds)

    async def _check_agreement(self) -> None:
        await self._until_lines_have_met()
        check_agreement(self.swarm)

    async def _until_lines_have_met(self) -> None:
        """Wait until other peers follow a degraded roster, which takes a stall, and two more cycles to catch up.

        A member that was restored from a backup may have started two lines; they meet as late.
        """
        swarm, cycle = self.swarm, self.scenario.cycle_seconds
        for _ in range(MOST_DEGRADED):
            degraded = newest_degraded(swarm)
            recent = swarm.rules.clock.cycle(swarm.round) - swarm.rules.stalled_cycles - QUIET_CYCLES - 1
            has_restored = bool(swarm.inspector.restored) and not self._has_waited_for_restored
            if degraded == self._followed and not has_restored and (degraded < recent or is_one_line(swarm)):
                return
            self._followed, self._has_waited_for_restored = degraded, True
            for _ in range(swarm.rules.stalled_cycles + 1):
                await self._run_to_end_of_cycle(swarm.now + cycle)
                if is_one_line(swarm) and not has_restored:
                    break
            await self._run_to_end_of_cycle(swarm.now + QUIET_CYCLES * cycle)

    async def _are_clocks_slewed(self) -> bool:
        """Wait for clocks to converge; return whether they are close enough to continue.

        They stay hours apart if a peer received only one other clock, and that was a liar's.
        """
        swarm, apart = self.swarm, self._clocks_apart()
        until = swarm.now + min(apart / (1.0 - SLOWEST) + CLOCK_PATIENCE_SECONDS, LONGEST_SLEW_SECONDS)
        while apart > swarm.rules.clock.tolerance_seconds and swarm.now < until:
            await swarm.run(min(until - swarm.now, self.scenario.cycle_seconds))
            apart = self._clocks_apart()
        return apart < LONGEST_SLEW_SECONDS * (1.0 - SLOWEST)

    def _clocks_apart(self) -> float:
        shown = [machine.swarm_now() for machine in self.swarm.running(trains=False) if not machine.is_hostile]
        return max(shown, default=0.0) - min(shown, default=0.0)

    def _may_wait_for_what_was_lost(self) -> bool:
        loses = any(trouble.kind in ("loss", "one-way") for trouble in self.scenario.troubles)
        running = self.swarm.running(trains=False)  # a bootstrap peer may be the only way to the others
        return loses and any(not machine.running.catch_up.is_complete() for machine in running)

    async def _run_to_end_of_cycle(self, earliest: float) -> None:
        """Run to shortly before the end of a cycle in swarm time, which clocks may have moved."""
        swarm, clock = self.swarm, self.swarm.rules.clock
        cycle = clock.cycle(clock.round_at(earliest + ROUND_ZERO + self._ahead_seconds()))
        end = clock.begin((cycle + 1) * clock.num_fragments) - ROUND_ZERO - BEFORE_THE_BORDER_SECONDS
        while (until := end - self._ahead_seconds()) > swarm.now + 1e-3:  # swarm time is slewed meanwhile
            await swarm.run_to(until)

    def _ahead_seconds(self) -> float:
        """Return how far swarm time is ahead of true time: the median over the honest machines that run."""
        swarm = self.swarm
        shown = [machine.swarm_now() - swarm.loop.true_seconds() for machine in swarm.honest() if machine.runs]
        return median(shown) if shown else 0.0

    async def _goes_on(self, before: list[int]) -> None:
        """Wait until entries are made for every fragment, all peers agree, and all are ready.

        Args:
            before: number of entries of each fragment a cycle ago.
        """
        swarm = self.swarm
        cycles = cycles_until_it_goes_on(swarm)
        swarm.inspector.checks += 1
        if cycles is None:
            swarm.inspector.skipped += 1
            return
        deadline = swarm.now + cycles * self.scenario.cycle_seconds
        while swarm.now < deadline:
            moves = all(now > then for now, then in zip(fragment_heights(swarm), before, strict=True))
            if moves and all(machine.running.ready for machine in swarm.honest()):
                return
            await self._run_to_end_of_cycle(swarm.now + self.scenario.cycle_seconds)
            await self._check_agreement()
        if not all(now > then for now, then in zip(fragment_heights(swarm), before, strict=True)):
            raise Violated("I6", f"the run made no progress within {cycles} quiet cycles; {swarm.describe()}")
        if not swarm.inspector.differing:  # while two witnesses differ, no peer becomes ready
            check_ready(swarm)


def play_scenario(scenario: Scenario, *, mistake: Mistake | None = None, with_trace: bool = False) -> TrialResult:
    """Run a scenario and return its result; a violated invariant does not raise."""
    began = time.process_time()
    trace = Trace() if with_trace else None
    planted: AbstractContextManager[object] = mistake.planted() if mistake is not None else nullcontext()
    with planted:
        swarm, broken, at, digest = play(lambda: _play(scenario, trace))
    inspector = swarm.inspector
    return TrialResult(
        seed=scenario.seed,
        num_peers=len(scenario.peers),
        num_entries=len(inspector.entries),
        checks=inspector.checks,
        skipped=inspector.skipped,
        seconds=time.process_time() - began,
        digest=digest,
        invariant=broken.invariant if broken is not None else None,
        text=f"second {at:.2f}: {broken.machine}: {broken}" if broken is not None else "",
        trace=tuple(trace.last(count=LINES_KEPT)) if trace is not None else (),
        tail=tuple(trace.last([broken.machine] if broken.machine else [])) if trace and broken else (),
    )


async def _play(scenario: Scenario, trace: Trace | None) -> tuple[Simulation, Violated | None, float, str]:
    codecs = codecs_of(scenario.codec, scenario.radial_spans)
    rules = run_rules(
        num_spans=scenario.num_spans,
        codecs=codecs,
        group_size=scenario.group_size,
        stalled_cycles=scenario.stalled_cycles,
        scrub_cycles=scenario.scrub_cycles,
        heartbeat_seconds=scenario.heartbeat_seconds,
        has_strangers=scenario.seed % 2 == 0,
    )
    swarm = Simulation(seed=scenario.seed, codecs=codecs, rules=rules, trace=trace, as_bytes=scenario.as_bytes)
    broken: Violated | None = None
    async with swarm:
        try:
            await Trial(scenario, swarm).play()
        except Violated as violated:
            broken = violated
        at, digest = swarm.now, swarm.digest()
        if broken is not None and trace is not None:
            for line in swarm.describe().splitlines():
                trace.add(at, "", "stands", line)
    return swarm, broken, at, digest
