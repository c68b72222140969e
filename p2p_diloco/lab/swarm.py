"""A whole swarm in one heap: machines are started, killed, put to sleep, split; and what can be claimed of them.

As easy to script as to draw: `swarm.add("p0"); swarm.run(60); swarm.kill("p0"); swarm.run_until(swarm.agreed, 120)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.lab.island import Island
from p2p_diloco.lab.machine import Disk, Machine
from p2p_diloco.lab.maths import SharedMaths
from p2p_diloco.lab.playing import Player
from p2p_diloco.lab.stage import DIAL_SECONDS, Violated
from p2p_diloco.lab.toy_run import found_run, signer, start_states, toy_rules, verify
from p2p_diloco.lab.trace import Trace
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.attendance import Self
from p2p_diloco.protocol.engine import PeerEngine, Progress
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.vector_work import Codecs

CHECKPOINT_ROUNDS = (1.0, 4.0)
SHORTEST_PAUSE_SECONDS = 1e-3
INT4 = Codecs(
    contribution=codec_named("int4"),
    row_mean=codec_named("int8"),
    entry=codec_named("int4"),
    rounds_stochastically=False,
)


def swarm_of(
    *,
    seed: int = 0,
    start: float = -10.0,
    num_spans: tuple[int, ...] = (3, 2),
    span_elements: int = 8,
    codecs: Codecs = INT4,
    group_size: int = 16,
    void_cycles: int = 8,
    scrub_cycles: int = 8,
    heartbeat_seconds: float = 1.0,
    trace: Trace | None = None,
) -> Swarm:
    """Return an empty swarm. Legend of the arguments: `toy_rules`."""
    rules = toy_rules(
        num_spans=num_spans,
        span_elements=span_elements,
        codecs=codecs,
        group_size=group_size,
        void_cycles=void_cycles,
        scrub_cycles=scrub_cycles,
        heartbeat_seconds=heartbeat_seconds,
    )
    maths = SharedMaths(codecs, span_elements)
    return Swarm(seed, start=start, rules=rules, maths=maths, trace=trace)


class Swarm(Player):
    """All machines of a run."""

    def __init__(self, seed: int, *, start: float, rules: RunRules, maths: SharedMaths, trace: Trace | None) -> None:
        super().__init__(seed, start=start, rules=rules, maths=maths, trace=trace)
        self._seed = seed

    # -- machines

    def add(
        self,
        name: str,
        *,
        dialable: bool = True,
        trains: bool = True,
        found: bool = False,
        step_seconds: float = 0.5,
        offset_seconds: float = 0.0,
        drift: float = 0.0,
        start: bool = True,
    ) -> Machine:
        """Add a machine and start it; `found`: it founds the run."""
        machine = Machine(
            name=name,
            dialable=dialable,
            trains=trains,
            step_seconds=step_seconds,
            offset_seconds=offset_seconds,
            drift=drift,
        )
        machine.founds = found
        self.machines[name] = machine
        self.by_peer[machine.peer] = machine
        if self.trace is not None:
            self.trace.names[machine.peer] = name
        if start:
            self.start(name)
        return machine

    def start(self, name: str, *, keep_disk: bool = True) -> Machine:
        """Start a machine that does not run, from its disk; on a full disk it ends at once."""
        machine = self.machines[name]
        assert not machine.runs, f"{name} runs already"
        if not keep_disk:
            machine.disk = Disk(incarnation=machine.disk.incarnation, is_full=machine.disk.is_full)
        try:
            incarnation = machine.disk.keep_incarnation()
        except StateError:
            self.note(machine, "ends", "its disk is full")
            return machine
        machine.life += 1
        machine.paused_at, machine.border_is_due = None, False
        machine.awake_since, machine.slept_seconds = self.now, 0.0
        machine.backlog.clear()
        machine.wanted = machine.cut_off_since = None
        machine.remembers = bool(machine.disk.rosters)
        machine.island = self._make_island(machine)
        machine.engine = self._make_engine(machine, incarnation)
        self.note(machine, "starts", f"incarnation {incarnation}{'' if keep_disk else ', with an empty disk'}")
        self.inspector.started(machine)
        if machine.founds and not machine.disk.checkpoint and _is_unfounded(machine):
            self.act(machine, self._found, machine)
        self.meet(machine)
        self.later(machine, 0.0, self._tick, machine, -1.0)
        self._checkpoint_later(machine)
        return machine

    def _make_island(self, machine: Machine) -> Island:
        island = Island(
            maths=self.maths,
            spans=self.spans,
            noise=random.Random(f"{self._seed} {machine.name} {machine.life}"),
            trains=machine.trains,
            complain=lambda complaint: self.inspector.complain(machine, complaint),
        )
        island.states = {span: self._replay(machine, span) for span in machine.disk.checkpoint}
        island.load()
        return island

    def _replay(self, machine: Machine, span: SpanId) -> SpanState:
        """Return a span of the checkpoint with all entries on the machine's disk that follow it."""
        state = self.inspector.shared(span, machine.disk.checkpoint[span])
        while (entry := machine.disk.entry_after(span, state.head.digest)) is not None:
            self.inspector.entry_replayed(span, state, entry)
            state = self.maths.absorb(state, entry)
        return state

    def _make_engine(self, machine: Machine, incarnation: int) -> PeerEngine:
        me = Self(
            peer=machine.peer,
            incarnation=incarnation,
            can_be_dialled=machine.dialable,
            trains=machine.trains,
            sign=signer(machine.peer),
        )
        return PeerEngine(me=me, rules=self.rules, verify=verify, recalled=machine.disk.recall(machine.vectors.states))

    def _found(self, machine: Machine) -> None:
        engine = machine.running
        rosters = engine.book.chain()
        founding = rosters[0] if rosters else found_run(self.rules, engine.me.member())
        states = start_states(self.rules, founding.roster)
        self.inspector.founded(states)
        machine.vectors.states = dict(states)
        machine.vectors.load()
        engine.hold_state({span: state.head for span, state in states.items()})
        self.perform(machine, engine.found(founding, machine.local(self.now)))

    def kill(self, name: str) -> None:
        """End a machine's process at once."""
        machine = self.machines[name]
        if machine.runs:
            self.note(machine, "killed", "")
            self.end(machine)

    def end(self, machine: Machine) -> None:
        """Let a process be gone: what it held in memory, what was on its way to it, and its links."""
        machine.engine = machine.island = machine.paused_at = None
        machine.life += 1
        machine.backlog.clear()
        self.forget_links(machine)

    def leave(self, name: str) -> None:
        """Have a machine say good-bye; it is for the caller to end it."""
        machine = self.machines[name]

        def leave() -> None:
            self.note(machine, "leaves", "")
            self.perform(machine, machine.running.leave(machine.local(self.now)))

        self.act(machine, leave)

    def pause(self, name: str) -> None:
        """Stop a machine as SIGSTOP does: its clock runs on, and what comes waits."""
        machine = self.machines[name]
        if machine.runs and not machine.paused:
            self.note(machine, "pauses", "")
            machine.paused_at = self.now

    def resume(self, name: str) -> None:
        """Let a paused machine go on: first what has waited, in order."""
        machine = self.machines[name]
        if machine.paused_at is None:
            return
        self.note(machine, "goes on", f"{len(machine.backlog)} things have waited")
        machine.slept_seconds += self.now - machine.paused_at
        machine.paused_at = None
        backlog, machine.backlog = machine.backlog, []
        life = machine.life
        for happening, arguments in backlog:
            if machine.life == life:
                self.act(machine, happening, *arguments)
        if machine.life == life:
            self.hasten(machine)
            self.meet(machine)

    def flip_bit(self, name: str, span: SpanId, place: int, bit: int) -> bool:
        """Flip a bit of a machine's anchor in memory; False when there is none or it would leave all measure."""
        machine = self.machines[name]
        if not machine.runs or span not in machine.vectors.states:
            return False
        if not machine.vectors.flip_bit(span, place, bit):
            return False
        self.note(machine, "bit flips", f"{span}, element {place}, bit {bit}")
        self.inspector.flipped(machine, span)
        return True

    def partition(self, *sides: Iterable[str]) -> None:
        """Let nothing pass between sides, until `heal`; machines of no side reach all."""
        self.note(None, "wall", " | ".join(" ".join(names) for names in sides))
        for pair in self.network.separate(*sides):
            self.cut(pair)

    def heal(self) -> None:
        """Take down all walls; those who can meet look for each other."""
        self.note(None, "no walls", "")
        self.network.sides = {}
        self.network.muted = frozenset()
        for machine in self.machines.values():
            if machine.runs and not machine.paused:
                self.meet(machine)

    def break_links(self) -> None:
        """Break every link at once, as when all machines have slept long enough."""
        for pair in list(self.network.links):
            self.cut(pair)

    # -- ticks and checkpoints

    def hasten(self, machine: Machine) -> None:
        """Have a machine tick at once."""
        machine.tick_at = self.now
        self.later(machine, 0.0, self._tick, machine, self.now)

    def _tick(self, machine: Machine, due: float) -> None:
        if due >= 0 and machine.tick_at != due:
            return
        engine, local = machine.running, machine.local(self.now)
        steps = machine.steps_made(self.now) if machine.trains else 0
        engine.progress = Progress(tokens=steps * 100, steps=steps)
        actions = engine.tick(local)
        self.inspector.opened(machine, actions)  # who has nothing to send says so when a tick finds it late
        self.perform(machine, actions)
        self.inspector.ticked(machine)
        self._look_when_cut_off(machine)
        if not machine.trains:
            self._drop_start(machine, local)
        wait = max(engine.wake_at(local) - local, SHORTEST_PAUSE_SECONDS) / (1.0 + machine.drift)
        machine.tick_at = self.now + wait
        self.later(machine, wait, self._tick, machine, machine.tick_at)

    def _look_when_cut_off(self, machine: Machine) -> None:
        """Let a machine look for links to anybody once those that it needs have had the time to come about."""
        if not machine.running.is_cut_off():
            machine.cut_off_since = None
        elif machine.cut_off_since is None:
            machine.cut_off_since = self.now
        elif machine.wanted is not None and self.now - machine.cut_off_since > 2 * DIAL_SECONDS[1]:
            self.look_around(machine, to_anybody=True)

    def _drop_start(self, machine: Machine, local: float) -> None:
        """Hold the start no longer than it is needed, as a session does that does not train."""
        if machine.running.holds_needlessly(local):
            machine.vectors.drop()
            machine.running.drop_state()

    def _checkpoint_later(self, machine: Machine) -> None:
        seconds = self.rng.uniform(*CHECKPOINT_ROUNDS) * self.rules.clock.round_seconds
        self.later(machine, seconds, self._checkpoint, machine)

    def _checkpoint(self, machine: Machine) -> None:
        if machine.trains and len(machine.vectors.states) == len(self.spans):
            machine.disk.keep_checkpoint(machine.vectors.states)
        self._checkpoint_later(machine)

    # -- claims

    def run_until(self, claim: Callable[[], bool], within: float, step: float = 0.5) -> float:
        """Let time pass until a claim holds; return how long that took.

        Raises:
            Violated: it did not in `within` seconds, or a promise was broken on the way.
        """
        begin = self.now
        while not claim():
            if self.now - begin > within:
                raise Violated("claim", f"not within {within} s; {self.describe()}")
            self.run(step)
        return self.now - begin

    def running(self, *, trains: bool = True) -> list[Machine]:
        """Return the machines that run; `trains`: only those that train."""
        return [m for m in self.machines.values() if m.runs and (m.trains or not trains)]

    def agreed(self, names: Iterable[str] | None = None) -> bool:
        """Tell whether these machines (all that train) hold the same bytes of every span at the same heads."""
        machines = [self.machines[name] for name in names] if names is not None else self.running()
        first = machines[0].vectors.states
        return len(first) == len(self.spans) and all(self._holds(machine, first) for machine in machines)

    def _holds(self, machine: Machine, states: object) -> bool:
        mine = machine.vectors.states
        return (
            isinstance(states, dict)
            and len(mine) == len(states)
            and all(state is mine[span] for span, state in states.items())
        )

    def members(self, name: str) -> set[str]:
        """Return the members of the roster in force at a machine."""
        return {self.by_peer[peer].name for peer in self.machines[name].roster.peers()}

    def all_members(self) -> bool:
        """Tell whether the roster in force everywhere lists exactly those that run, at their incarnations."""
        wanted = {(m.peer, m.running.me.incarnation) for m in self.running()}
        rosters = [machine.running.book.in_force for machine in self.running()]
        return all(
            roster is not None and {(x.peer, x.incarnation) for x in roster.members} == wanted for roster in rosters
        )

    def height(self, name: str) -> int:
        """Return the entries that a machine has absorbed, summed over all spans."""
        return self.machines[name].height()

    def describe(self) -> str:
        """Return where everybody stands, a line each."""
        lines = [f"second {self.now:.1f}, round {self.rules.clock.round_at(self.now)}"]
        for machine in self.machines.values():
            if not machine.runs:
                lines.append(f"  {machine.name}: not running")
                continue
            engine, roster = machine.running, machine.running.book.in_force
            names = " ".join(sorted(self.by_peer[m.peer].name for m in roster.members)) if roster is not None else ""
            lines.append(
                f"  {machine.name}: {'paused ' if machine.paused else ''}roster {roster.k if roster else None}"
                f" epoch {roster.epoch if roster else None} [{names}] {'ready' if engine.ready else 'not ready'},"
                f" height {machine.height()}, void cycles {engine.membership.void_cycles}, links {len(machine.links)};"
                f" last: {[f'{at:.0f} {report.topic}' for at, report in list(machine.reports)[-3:]]}"
            )
        return "\n".join(lines)


def _is_unfounded(machine: Machine) -> bool:
    """Tell whether a founder knows of no roster but its own: it founds, or does so again until one is certified."""
    roster = machine.running.book.in_force
    return roster is None or roster.k == 0
