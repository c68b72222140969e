"""One seed, from its scenario to its result: bad times, quiet times, and what must hold in both."""

from __future__ import annotations

import time
from dataclasses import dataclass

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.ids import sha256
from p2p_diloco.lab.endings import (
    ASKED_AGAIN_SECONDS,
    SETTLE_SECONDS,
    check_agreement,
    check_memory,
    check_ready,
    check_tables,
    cycles_until_it_goes_on,
    fragment_heights,
    senior_roster,
    still_names_dead,
)
from p2p_diloco.lab.faults import FaultKind, is_for_good, mend, strike
from p2p_diloco.lab.mistakes import Mistake, planted_in_rules
from p2p_diloco.lab.network import Weather
from p2p_diloco.lab.scenario import FOUNDER, Scenario
from p2p_diloco.lab.stage import Violated
from p2p_diloco.lab.swarm import Swarm, swarm_of
from p2p_diloco.lab.trace import Trace
from p2p_diloco.outer.radial import mark_radial
from p2p_diloco.swarm.vector_work import Codecs

START_SECONDS = -10.0
SPAN_ELEMENTS = 8
QUIET_CYCLES = 2
BEFORE_THE_BORDER_SECONDS = 0.6
"""Ends of cycles are looked at so long before them: clocks are right to within less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What came of one seed.

    Attributes:
        invariant: the first promise that was broken; None: all held.
        text: how; empty when nothing was broken.
        trace: what happened before, for people; empty unless asked for.
        digest: over all that peers hold at the end; the same seed gives the same digest everywhere.
    """

    seed: int
    num_peers: int
    num_events: int
    num_entries: int
    seconds: float
    digest: str
    invariant: str | None = None
    text: str = ""
    trace: tuple[str, ...] = ()


class Trial:
    """Plays one scenario."""

    def __init__(self, scenario: Scenario, *, mistake: Mistake | None = None, trace: Trace | None = None) -> None:
        self.scenario = scenario
        codec = codec_named(scenario.codec)
        self.swarm = swarm_of(
            seed=scenario.seed,
            start=START_SECONDS,
            num_spans=scenario.num_spans,
            span_elements=SPAN_ELEMENTS,
            codecs=Codecs(
                contribution=codec,
                row_mean=codec_named("int8") if scenario.codec == "int4" else codec,
                entry=codec,
                rounds_stochastically=False,
                radial={span: mark_radial(0, SPAN_ELEMENTS, ()) for span in scenario.radial_spans},
            ),
            group_size=scenario.group_size,
            void_cycles=scenario.void_cycles,
            scrub_cycles=scenario.scrub_cycles,
            heartbeat_seconds=scenario.heartbeat_seconds,
            mistake=mistake,
            trace=trace,
        )

    def play(self) -> None:
        """Play it to the end.

        Raises:
            Violated: a promise is broken.
        """
        swarm, scenario = self.swarm, self.scenario
        self._set_up()
        swarm.run_to(scenario.bad_from)
        swarm.network.weather = scenario.weather
        for fault in scenario.strikes:
            swarm.at(fault.at, strike, swarm, fault)
            if not is_for_good(fault):
                swarm.at(fault.until, mend, swarm, fault)
        swarm.run_to(scenario.bad_until + 1e-3)
        self._end_faults()
        self._quiet()

    def _set_up(self) -> None:
        swarm = self.swarm
        if self.scenario.helper:
            swarm.add(FOUNDER, trains=False, found=True)
        for place, peer in enumerate(self.scenario.peers):
            founds = place == 0 and not self.scenario.helper
            swarm.add(
                peer.name,
                dialable=peer.dialable,
                found=founds,
                step_seconds=peer.step_seconds,
                offset_seconds=peer.offset_seconds,
                drift=peer.drift,
                start=founds,
            )
            if not founds:
                swarm.at(max(peer.starts_at, START_SECONDS), self._come, peer.name)

    def _come(self, name: str) -> None:
        if not self.swarm.machines[name].runs:
            self.swarm.start(name)

    def _end_faults(self) -> None:
        """Make all well, but for those who stay dead; never the last that can be dialled."""
        swarm = self.swarm
        swarm.note(None, "faults end", "")
        swarm.network.weather = Weather()
        for link in swarm.network.links.values():
            for half in link.halves:
                half.lags = (0.0, 0.0)
        swarm.heal()
        dead = {name for fault in self.scenario.strikes if is_for_good(fault) for name in fault.names}
        for name, machine in swarm.machines.items():
            swarm.resume(name)
            machine.disk.is_full = False
            if not machine.runs and name not in dead:
                swarm.start(name)
        for name, machine in swarm.machines.items():
            if not machine.runs and not any(m.runs and m.dialable for m in swarm.machines.values()):
                swarm.start(name)

    def _quiet(self) -> None:
        swarm, cycle = self.swarm, self.scenario.cycle_seconds
        swarm.run(ASKED_AGAIN_SECONDS if self._may_wait_for_what_was_lost() else SETTLE_SECONDS)
        self._until_the_living_are_members()
        self._run_to_end_of_cycle(swarm.now + QUIET_CYCLES * cycle)
        check_agreement(swarm)
        before = fragment_heights(swarm)
        self._run_to_end_of_cycle(swarm.now + cycle)
        check_agreement(swarm)
        self._goes_on(before)
        check_tables(swarm)
        for _ in range(2 * self.scenario.scrub_cycles + 2):
            if not swarm.inspector.differing:
                return
            self._run_to_end_of_cycle(swarm.now + cycle)
        check_memory(swarm)

    def _until_the_living_are_members(self) -> None:
        """Let the void cycles pass that a roster needs whose majority is dead, and the cycles in which it shrinks."""
        if not still_names_dead(self.swarm):
            return
        for _ in range(cycles_until_it_goes_on(self.swarm) or 0):
            self._run_to_end_of_cycle(self.swarm.now + self.scenario.cycle_seconds)
            roster = senior_roster(self.swarm)
            if roster is None or all(self.swarm.by_peer[m.peer].runs for m in roster.members):
                return

    def _may_wait_for_what_was_lost(self) -> bool:
        scenario = self.scenario
        loses = scenario.weather.loss > 0 or any(s.kind is FaultKind.ONE_WAY for s in scenario.strikes)
        return loses and any(not machine.running.catch_up.is_complete() for machine in self.swarm.running())

    def _run_to_end_of_cycle(self, earliest: float) -> None:
        clock = self.swarm.rules.clock
        cycle = clock.cycle(clock.round_at(earliest))
        self.swarm.run_to(clock.begin((cycle + 1) * clock.num_fragments) - BEFORE_THE_BORDER_SECONDS)

    def _goes_on(self, before: list[int]) -> None:
        """Wait until entries are made for every fragment, all agree, and all are ready.

        Args:
            before: entries of each fragment a cycle ago.
        """
        swarm = self.swarm
        cycles = cycles_until_it_goes_on(swarm)
        if cycles is None:
            return
        for _ in range(cycles):
            moves = all(now > then for now, then in zip(fragment_heights(swarm), before, strict=True))
            if moves and all(machine.running.ready for machine in swarm.running()):
                return
            self._run_to_end_of_cycle(swarm.now + self.scenario.cycle_seconds)
            check_agreement(swarm)
        if not all(now > then for now, then in zip(fragment_heights(swarm), before, strict=True)):
            raise Violated("I6", f"the run does not go on within {cycles} quiet cycles; {swarm.describe()}")
        if not swarm.inspector.differing:  # two witnesses that differ make nobody ready before they are mended
            check_ready(swarm)

    def digest(self) -> str:
        """Return a digest over where all machines stand and how many events that took."""
        parts = [str(self.swarm.num_events).encode()]
        for name, machine in sorted(self.swarm.machines.items()):
            parts.append(name.encode())
            if machine.runs:
                parts += [machine.vectors.states[span].head.digest for span in sorted(machine.vectors.states)]
        return sha256(*parts).hex()


def play(scenario: Scenario, *, mistake: Mistake | None = None, with_trace: bool = False) -> TrialResult:
    """Play a scenario and return what came of it; never raises for what the swarm does."""
    began = time.perf_counter()
    trace = Trace() if with_trace else None
    trial = Trial(scenario, mistake=mistake, trace=trace)
    broken: Violated | None = None
    try:
        with planted_in_rules(mistake):
            trial.play()
    except Violated as violated:
        broken = violated
    swarm = trial.swarm
    return TrialResult(
        seed=scenario.seed,
        num_peers=len(scenario.peers),
        num_events=swarm.num_events,
        num_entries=len(swarm.inspector.entries),
        seconds=time.perf_counter() - began,
        digest=trial.digest(),
        invariant=broken.invariant if broken is not None else None,
        text=_at(swarm, broken) if broken is not None else "",
        trace=_lines(swarm, trace, broken),
    )


def _at(swarm: Swarm, broken: Violated) -> str:
    who = f"{broken.machine}: " if broken.machine else ""
    return f"second {swarm.now:.2f}, round {swarm.rules.clock.round_at(swarm.now)}: {who}{broken}"


def _lines(swarm: Swarm, trace: Trace | None, broken: Violated | None) -> tuple[str, ...]:
    if trace is None or broken is None:
        return ()
    concerned = [broken.machine] if broken.machine else []
    return (*trace.last(concerned), *swarm.describe().splitlines())
