"""A whole swarm on virtual time: start, kill, suspend and partition its machines, and check claims about them.

It can be scripted or drawn from a seed. A script:

    async with Simulation(seed=1) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1")
        await swarm.until(swarm.all_members, within=120.0)
        swarm.kill("p0")
        await swarm.run(60.0)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from p2p_diloco.codec.vectors import numpy_alone
from p2p_diloco.errors import StateError
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.storage.checkpoint import CheckpointFolder
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.testing.network import MemoryDirectory
from p2p_diloco.transport.link import TransportLimits
from simulator.clock import MachineClock
from simulator.disk import DiskRack
from simulator.inspector import Inspected, Inspector, Violated
from simulator.machine import Machine, SharedParts
from simulator.maths import SharedMaths
from simulator.network import OPEN, OUTBOUND_ONLY, SimulatedNetwork, shared_values
from simulator.process import OUTSIDE, Process, SimulationLoop, run_in
from simulator.run import ROUND_ZERO, RUN, codecs_of, run_rules
from simulator.trace import Trace

START_SECONDS = ROUND_ZERO - 10.0
JUST_SECONDS = 1e-3
DELAY_SECONDS = (0.01, 0.1)
UPTIME_SECONDS = (600.0, 90_000.0)
_T = TypeVar("_T")


class Simulation:
    """All machines of a run. Enter it in a `SimulationLoop`, as `play` does. Not thread-safe.

    Args:
        seed: determines everything that is drawn.
        rules: rules of the run; a small run unless given.
        trace: where to write what happens; None: nowhere.
        as_bytes: whether each receiver decodes every frame itself; otherwise receivers of the same frame share its
            value, which is faster.
    Attributes:
        broken: the first violation of an invariant.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        codecs: Codecs | None = None,
        rules: RunRules | None = None,
        trace: Trace | None = None,
        as_bytes: bool = True,
    ) -> None:
        codecs = codecs if codecs is not None else codecs_of("int4")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop), "a simulation runs in a SimulationLoop; use simulator.play"
        self.loop = loop
        self.seed = seed
        self.rules = rules if rules is not None else run_rules(codecs=codecs)
        self.spans = tuple(self.rules.span_elements)
        self.maths = SharedMaths(codecs, self.rules.span_elements[self.spans[0]])
        self.network = SimulatedNetwork(seed, delay_seconds=DELAY_SECONDS)
        self.directory = MemoryDirectory(loop.true_seconds)
        self.machines: dict[str, Machine] = {}
        self.by_peer: dict[PeerId, Machine] = {}
        self.inspected: dict[PeerId, Inspected] = {}
        """All peers that may be put on a roster, including strangers."""
        self.rng = random.Random(f"troubles of {seed}")
        self.trace = trace
        self.broken: Violated | None = None
        self.broken_at = 0.0
        self.num_events = 0
        self.inspector = Inspector(
            rules=self.rules,
            maths=self.maths,
            machines=self.inspected,
            now=lambda: self.now,
            violated=self.violated,
        )
        self._as_bytes = as_bytes
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._rack = DiskRack()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._exits = ExitStack()
        if trace is not None:
            self.network.tap = lambda sender, to, lane, frame: trace.frame(self.now, sender, to, frame)

    async def __aenter__(self) -> Self:
        self._exits.enter_context(self._rack)
        self._exits.enter_context(numpy_alone())  # compiled loops cost more than they save on a few numbers
        if not self._as_bytes:
            self._exits.enter_context(shared_values())
        self.loop.set_exception_handler(self._failed_callback)
        self.loop.executor_delay = self._disk_seconds
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.machines:
            self.end(name, "ends with the simulation")
        await self._torn_down()
        self.loop.set_exception_handler(None)
        self._exits.close()

    # -- time

    @property
    def now(self) -> float:
        """True time in seconds since round 0 began."""
        return self.loop.true_seconds() - ROUND_ZERO

    async def run_to(self, second: float) -> None:
        """Let time pass until a second.

        Raises:
            Violated: an invariant was broken.
        """
        if second > self.now and self.broken is None:
            await asyncio.wait({self._stopped}, timeout=second - self.now)
        if self.broken is not None:
            raise self.broken

    async def run(self, seconds: float) -> None:
        """Let time pass for this many seconds; see `run_to`."""
        await self.run_to(self.now + seconds)

    @property
    def round(self) -> int:
        """The current round by true time."""
        return self.rules.clock.round_at(self.loop.true_seconds())

    async def run_to_round(self, round_index: int) -> None:
        """Let time pass until a round has just begun."""
        await self.run_to(self.rules.clock.begin(round_index) - ROUND_ZERO + JUST_SECONDS)

    async def grows(self, name: str, *, entries: int = 8, within: float = 300.0) -> None:
        """Let time pass until a machine has absorbed this many more entries; see `until`."""
        height = self.machines[name].height()
        await self.until(lambda: self.machines[name].height() >= height + entries, within)

    async def finish(self, *, rounds: int = 4, within_rounds: int = 8) -> None:
        """Make all peers stop contributing some rounds from now, and let time pass until they agree; see `until`."""
        last = self.round + rounds
        for machine in self.running():
            machine.running.set_conditions(replace(machine.running.conditions, last_round=last))
        await self.run_to_round(last + 1)
        await self.until(self.agreed, within_rounds * self.rules.clock.round_seconds)

    async def until(self, claim: Callable[[], bool], within: float, step: float = 0.5) -> float:
        """Let time pass until a claim holds; return how long that took.

        Raises:
            Violated: the claim did not hold within this time, or an invariant was broken.
        """
        begin = self.now
        while not claim():
            if self.now - begin > within:
                raise Violated("claim", f"not within {within} s; {self.describe()}")
            await self.run(step)
        return self.now - begin

    def at(self, second: float, happening: Callable[..., object], *args: Any) -> None:
        """Schedule a call at a second, outside of all machines."""
        self.loop.call_at(second + ROUND_ZERO, happening, *args, context=OUTSIDE)

    # -- machines

    def add(
        self,
        name: str,
        *,
        trains: bool = True,
        founds: bool = False,
        place: str = OPEN,
        believes_open: bool | None = None,
        step_seconds: float = 0.5,
        wall_offset: float = 0.0,
        drift: float = 0.0,
        counts_sleep: bool = False,
        limits: TransportLimits | None = None,
        copied_from: str = "",
        start: bool = True,
    ) -> Machine:
        """Add a machine and start it.

        Args:
            place: `OPEN`, `OUTBOUND_ONLY`, or the name of a home network.
            believes_open: whether the peer believes that it can be dialled; None: the truth.
            wall_offset, drift: errors of its clocks.
            counts_sleep: whether its steady clock counts sleep, as on Linux.
            copied_from: name of a machine whose identity and current files it gets.
        """
        draw = random.Random(f"{self.seed} {name} boots")
        machine = Machine(
            name=name,
            around=SharedParts(
                rules=self.rules,
                maths=self.maths,
                network=self.network,
                directory=self.directory,
                inspector=self.inspector,
                true_seconds=self.loop.true_seconds,
                failed=self._machine_failed,
                note=self.note,
                seed=self.seed,
            ),
            clock=MachineClock(
                self.loop.true_seconds() - draw.uniform(*UPTIME_SECONDS), drift=drift, wall_offset=wall_offset
            ),
            disk=self._rack.disk(name),
            place=place,
            copied_from=copied_from,
            believes_open=believes_open if believes_open is not None else place == OPEN,
            trains=trains,
            founds=founds,
            counts_sleep=counts_sleep,
            step_seconds=step_seconds,
            limits=limits if limits is not None else TransportLimits(),
        )
        machine.clock.set_wall(self.loop.true_seconds(), wall_offset)
        founder = next((m for m in self.machines.values() if m.founds), None)
        if founder is not None:
            machine.first_known = {founder.peer: founder.addresses}
        self.machines[name] = machine
        if copied_from:
            self._copy(self.machines[copied_from], machine)
        else:
            self.by_peer[machine.peer] = self.inspected[machine.peer] = machine
        self.network.places[machine.peer] = place
        if self.trace is not None and not copied_from:
            self.trace.names[machine.peer] = name
        if start:
            self.start(name)
        return machine

    def _copy(self, original: Machine, copy: Machine) -> None:
        """Give a machine the files of another; contradictions in what the two then sign are not violations."""
        with self._rack.aside():
            copy.disk.restore(original.disk.snapshot())
        copy.lives, original.is_liar, copy.is_liar = original.lives, True, True
        self.inspector.restored.add(original.peer)

    def keep_on_disks(self, rosters: Sequence[CertifiedRoster], states: Mapping[SpanId, SpanState]) -> None:
        """Give every machine the disk of a stopped member: these rosters, and a checkpoint of these spans."""
        self.inspector.founded(states)
        self.inspector.rosters.update({certified.roster.digest(): certified.roster for certified in rosters})
        for machine in self.machines.values():
            folder = RunFolder(machine.disk.path, RUN)
            for certified in rosters:
                folder.keep_roster(certified)
            CheckpointFolder(folder.path, run=RUN, elements=self.rules.span_elements, keep=1).save(states)

    def start(self, name: str) -> None:
        """Start a machine's process, once its previous one is torn down."""
        machine = self.machines[name]
        if machine.runs or self.broken is not None:
            return
        ending = self._ending.get(name)
        if ending is not None and not ending.done():
            ending.add_done_callback(lambda _: self.start(name), context=OUTSIDE)
            return
        machine.start()

    def end(self, name: str, reason: str = "is killed") -> None:
        """End a machine's process at once."""
        task = self.machines[name].end(reason)
        if task is not None:
            self._ending[name] = task

    def kill(self, name: str) -> None:
        """End a machine's process as kill -9 does."""
        self.end(name)

    def cut_power(self, name: str) -> None:
        """Switch a machine off: its process ends, and its disk loses what was not synced."""
        machine = self.machines[name]
        self.end(name, "loses power")
        with self._rack.aside():
            num_lost = machine.disk.cut_power(self.rng)
        if num_lost:
            self.note(machine, "disk", f"{num_lost} files lost unsynced data")
        machine.clock.boot(self.loop.true_seconds())

    def wipe(self, name: str) -> None:
        """End a machine's process and delete its state, but keep its identity."""
        self.end(name, "loses its state")
        with self._rack.aside():
            self.machines[name].disk.wipe()
        self.inspector.losses[self.machines[name].peer] += 1

    def snapshot(self, name: str) -> dict[Path, bytes]:
        """Return all files of a machine."""
        with self._rack.aside():
            return self.machines[name].disk.snapshot()

    def restore(self, name: str, files: dict[Path, bytes], *, is_lost: bool = True) -> None:
        """Replace a machine's files with a snapshot; its process must have ended.

        Args:
            is_lost: whether this takes back what the machine has written since; False if the snapshot is its newest
                state.
        """
        with self._rack.aside():
            self.machines[name].disk.restore(files)
        self.inspector.losses[self.machines[name].peer] += is_lost

    async def depart(self, name: str) -> None:
        """Make a machine declare that it leaves, finish the round and end."""
        self.leave(name)
        await self.run_to_round(self.round + 1)
        self.end(name, "has left")

    def leave(self, name: str) -> None:
        """Make a machine declare that it leaves; the caller must end it."""
        machine = self.machines[name]
        if machine.node is not None and machine.process is not None and not machine.is_stopped:
            self.note(machine, "leaves", "")
            run_in(machine.process, machine.node.leave)

    def stop(self, name: str, *, sleeps: bool = False) -> None:
        """Stop a machine's process as SIGSTOP does; with `sleeps`, suspend the machine and its monotonic clock."""
        machine = self.machines[name]
        if machine.process is None or machine.is_stopped:
            return
        self.note(machine, "sleeps" if sleeps else "stops", "")
        machine.process.stop()
        self.network.stall(machine.peer)
        if sleeps:
            machine.clock.sleep(self.loop.true_seconds())

    def pause(self, name: str) -> None:
        """Pause a machine as a hypervisor does: all its clocks stop, and it cannot notice."""
        self.stop(name)
        self.machines[name].clock.pause(self.loop.true_seconds())

    def go_on(self, name: str) -> None:
        """Resume a stopped machine; deferred callbacks run first, in order."""
        machine = self.machines[name]
        machine.clock.wake(self.loop.true_seconds())
        if machine.process is None or not machine.is_stopped:
            return
        self.note(machine, "goes on", f"{len(machine.process.waiting)} callbacks have waited")
        machine.process.go_on()
        self.network.wake(machine.peer)

    def partition(self, *sides: Iterable[str]) -> None:
        """Block traffic between sides until `heal`; machines on no side reach all others."""
        groups = [[self.machines[name].peer for name in names] for names in sides]
        self.note(None, "wall", " | ".join(" ".join(self.by_peer[peer].name for peer in group) for group in groups))
        for at, group in enumerate(groups):
            self.network.split(group, [peer for other in groups[at + 1 :] for peer in other])

    def heal(self) -> None:
        """Remove all partitions and one-way failures."""
        self.note(None, "no walls", "")
        self.network.muted = frozenset()
        self.network.heal()

    def break_links(self, name: str) -> None:
        """Break all links of a machine."""
        machine = self.machines[name]
        if machine.transport is not None and machine.process is not None and not machine.is_stopped:
            for peer in sorted(machine.transport.linked_peers()):
                run_in(machine.process, machine.transport.hang_up, peer)

    def flip_bit(self, name: str, span: SpanId, place: int, bit: int) -> bool:
        """Flip a bit of a machine's anchor in memory; return False if that is impossible or the change too large."""
        machine = self.machines[name]
        if not machine.runs or span not in machine.vectors.states:
            return False
        if not machine.vectors.flip_bit(span, place, bit):
            return False
        self.note(machine, "bit flips", f"{span}, element {place}, bit {bit}")
        self.inspector.flipped(machine, span, machine.vectors.states[span])
        return True

    async def _torn_down(self) -> None:
        tasks = [task for task in self._ending.values() if not task.done()]
        if tasks:
            await asyncio.wait(tasks)

    def _disk_seconds(self, process: Process) -> float:
        for machine in self.machines.values():
            if machine.process is process:
                return machine.disk.write_seconds
        return 0.0

    # -- failures

    def violated(self, invariant: str, text: str, machine: str) -> None:
        """Record that an invariant does not hold; the first violation ends the simulation."""
        if self.broken is None:
            self.broken, self.broken_at = Violated(invariant, text, machine), self.now
            self.note(None, "BROKEN", f"{invariant}: {machine}: {text}")
            if not self._stopped.done():
                self._stopped.set_result(None)

    def _machine_failed(self, machine: Machine, error: BaseException) -> None:
        if isinstance(error, StateError):
            self.note(machine, "ends", str(error))
            self.loop.call_soon(self.end, machine.name, "ends", context=OUTSIDE)
            return
        self.violated("I9", f"{type(error).__name__}: {error}", machine.name)

    def _failed_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        process = getattr(context.get("handle"), "process", None)
        if isinstance(error, StateError) or (process is not None and process.is_dying):
            return  # `_machine_failed` handles it, or the process was killed
        self.violated("I9", f"{context.get('message')}: {type(error).__name__}: {error}", _whose(self, context))
        if self.trace is not None and error is not None:
            self.trace.error(self.now, error)

    def note(self, machine: Machine | None, word: str, text: str) -> None:
        """Add a line to the trace."""
        self.num_events += 1
        if self.trace is not None:
            self.trace.add(self.now, machine.name if machine is not None else "", word, text)

    # -- claims

    def running(self, *, trains: bool = True) -> list[Machine]:
        """Return the running machines; with `trains`, only those that train."""
        return [m for m in self.machines.values() if m.runs and (m.trains or not trains)]

    def honest(self) -> list[Machine]:
        """Return the machines that run, train, and have never altered the messages of their nodes."""
        return [machine for machine in self.running() if not machine.is_hostile]

    def all_members(self) -> bool:
        """Return whether each roster in force lists exactly the trainers that run, in their current incarnations."""
        wanted = {(m.peer, m.running.membership.local.me.incarnation) for m in self.running()}
        rosters = [machine.running.book.in_force for machine in self.running()]
        return all(
            roster is not None and {(x.peer, x.incarnation) for x in roster.members if x.trains} == wanted
            for roster in rosters
        )

    def all_ready(self) -> bool:
        """Return whether `all_members` holds, and all peers that run and train are ready."""
        return self.all_members() and all(machine.running.ready for machine in self.running())

    async def outlive(self, name: str, within: float = 600.0) -> None:
        """Kill a machine that the others no longer need, and wait until no roster in force lists it."""
        self.kill(name)
        peer = self.machines[name].peer
        await self.until(lambda: not any(peer in machine.roster.peers() for machine in self.running()), within)

    def all_settled(self) -> bool:
        """Return whether `all_ready` holds, all trainers count, and exactly those reduce that can be dialled."""
        if not self.all_ready():
            return False
        can_reduce = {machine.peer: machine.place == OPEN for machine in self.running()}
        members = [member for machine in self.running() for member in machine.roster.members if member.trains]
        return all(member.counts and member.reduces == can_reduce[member.peer] for member in members)

    def members(self, name: str) -> set[str]:
        """Return the names of the trainers on the roster in force at a machine."""
        return {self.inspected[member.peer].name for member in self.machines[name].roster.members if member.trains}

    def agreed(self, names: Iterable[str] | None = None) -> bool:
        """Return whether these machines (default: all that train and run) hold the same bytes of every span."""
        machines = [self.machines[name] for name in names] if names is not None else self.running()
        digests = {self.state_digest(machine) for machine in machines}
        return len(digests) == 1 and None not in digests

    def state_digest(self, machine: Machine) -> str | None:
        """Return a digest of all spans of a machine; None if it lacks one."""
        states = machine.vectors.states
        if len(states) != len(self.spans):
            return None
        return sha256(*(self.maths.raw(state) for _, state in sorted(states.items()))).hex()

    def describe(self) -> str:
        """Return the state of every machine, one line each."""
        lines = [f"second {self.now:.1f}, round {self.rules.clock.round_at(self.loop.true_seconds())}"]
        for machine in self.machines.values():
            if not machine.runs:
                lines.append(f"  {machine.name}: not running")
                continue
            engine, roster = machine.running, machine.running.book.in_force
            names = " ".join(sorted(self.by_peer[m.peer].name for m in roster.members)) if roster is not None else ""
            off = machine.swarm_now() - self.loop.true_seconds()
            lines.append(
                f"  {machine.name}: {'stopped ' if machine.is_stopped else ''}roster {roster.k if roster else None}"
                f" [{names}] {'ready' if engine.ready else 'not ready'}, height {machine.height()},"
                f" links {len(engine.linked)}, swarm time off by {off:.2f} s;"
                f" last: {[f'{at:.0f} {topic}' for at, topic, _ in list(machine.reports)[-3:]]}"
            )
        return "\n".join(lines)

    def digest(self) -> str:
        """Return a digest of the state of all machines and of the number of events so far."""
        parts = [str(self.num_events).encode(), f"{self.now:.6f}".encode()]
        for name, machine in sorted(self.machines.items()):
            parts.append(name.encode())
            if machine.runs:
                parts += [machine.vectors.states[span].head.digest for span in sorted(machine.vectors.states)]
            if machine.transport is not None:
                counters = machine.transport.counters
                parts.append(f"{counters.control.bytes_sent} {counters.bulk.bytes_sent}".encode())
        return sha256(*parts).hex()


def _whose(simulation: Simulation, context: dict[str, Any]) -> str:
    process = getattr(context.get("handle"), "process", None)
    return next((m.name for m in simulation.machines.values() if process is not None and m.process is process), "")


def play(scene: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a scene on virtual time, starting shortly before round 0."""
    with asyncio.Runner(loop_factory=lambda: SimulationLoop(START_SECONDS)) as runner:
        return runner.run(scene())


__all__ = ["OPEN", "OUTBOUND_ONLY", "Simulation", "play"]
