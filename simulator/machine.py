"""One machine of a simulation: its clocks, its disk, its place on the network, and the peer that runs on it.

The peer is assembled as in a session: the shipped node, link keeper, swarm clock, run folder, archive and checkpoints.
A `SimulatedIsland` takes the place of the training thread. The vector worker is replaced by one that answers at once,
or late.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id, short_peer_id
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.node.vector_actions import Done
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import Action, RoundClosed
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.results import Result
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.storage.archive import Archive, Saver
from p2p_diloco.storage.run_folder import RunFolder, WatchedMemory
from p2p_diloco.transport.directory import Directory, PeerRecord, PeerRole, sign_record
from p2p_diloco.transport.link import TransportLimits
from simulator.clock import MachineClock
from simulator.disk import SimulatedDisk
from simulator.inspector import Inspector
from simulator.island import SimulatedIsland
from simulator.maths import OUTER, SharedMaths
from simulator.network import Mutator, SimulatedNetwork, SimulatedTransport
from simulator.process import Process, run_in
from simulator.reach import SimulatedReach
from simulator.run import (
    MANIFEST,
    ROUND_ZERO,
    RUN,
    found_run,
    key_named,
    signer,
    start_states,
    verify,
)

REPORTS_KEPT = 64
STATUS_SECONDS = 1.0
CHECKPOINT_SECONDS = (8.0, 32.0)
KEEP_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """The parts that all machines of a simulation share."""

    rules: RunRules
    maths: SharedMaths
    network: SimulatedNetwork
    directory: Directory
    inspector: Inspector
    true_seconds: Callable[[], float]
    failed: Callable[[Machine, BaseException], None]
    note: Callable[[Machine | None, str, str], None]
    seed: int


@dataclass(eq=False)
class Machine:
    """One machine, on which processes are started and ended. It has an engine while a process runs.

    Attributes:
        copied_from: name of the machine whose identity it shares; empty: it has its own.
        place: its place on the network; `believes_open` is what the peer believes about it.
        is_vouched_for: whether provers sign that it can be dialled although it cannot.
        counts_sleep: whether its steady clock counts sleep, as on Linux.
        step_seconds: duration of an inner step.
        founds: whether it founds the run, and founds it again if it dies before another peer is certified.
        reduce_seconds: maximum delay of the vector worker's results.
        limits: limits of its transport.
        checkpoint_seconds: time between two checkpoints; drawn unless given.
        first_known: peers that its invite names.
        mutator: returns what it sends in place of what its node wants sent; None: it is honest.
        is_liar: whether it has ever lied.
        remembers: whether it knew at its last start how its earlier processes had voted.
        followed_at: time at which it first followed each roster of its book, in true seconds.
    """

    name: str
    around: SharedParts
    clock: MachineClock
    disk: SimulatedDisk
    place: str
    believes_open: bool
    copied_from: str = ""
    is_vouched_for: bool = False
    trains: bool = True
    founds: bool = False
    counts_sleep: bool = False
    step_seconds: float = 0.5
    reduce_seconds: float = 0.0
    share: int | None = None
    limits: TransportLimits = field(default_factory=TransportLimits)
    checkpoint_seconds: float = 0.0
    first_known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    mutator: Mutator | None = None
    is_liar: bool = False
    remembers: bool = False
    process: Process | None = None
    node: SwarmNode | None = None
    engine: PeerEngine | None = None
    island: SimulatedIsland | None = None
    transport: SimulatedTransport | None = None
    swarm_clock: SwarmClock | None = None
    task: asyncio.Task[None] | None = None
    lives: int = 0
    ready_at: float = 0.0
    followed_at: dict[Digest, float] = field(default_factory=dict)
    reports: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))
    topics: set[str] = field(default_factory=set)
    linked_at: dict[PeerId, float] = field(default_factory=dict)
    closed: deque[RoundClosed] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))

    def __post_init__(self) -> None:
        self.key = key_named(self.copied_from or self.name)
        self.peer: PeerId = self.key.peer
        if not self.checkpoint_seconds:
            draw = random.Random(f"{self.around.seed} {self.name} saves")
            self.checkpoint_seconds = draw.uniform(*CHECKPOINT_SECONDS)

    def __repr__(self) -> str:
        return self.name

    # -- current state

    @property
    def runs(self) -> bool:
        """Return whether it has a process, running or stopped."""
        return self.engine is not None

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped, or the machine is asleep."""
        return self.process is not None and self.process.is_stopped

    def is_there(self, incarnation: int) -> bool:
        """Return whether this incarnation of its peer runs and does not leave."""
        if self.engine is None or self.is_stopped:
            return False
        membership = self.engine.membership
        return membership.local.me.incarnation == incarnation and not membership.local.leaving

    def linked_seconds(self, peer: PeerId) -> float:
        """Return for how long its peer has had a link to `peer`; 0 if it has none."""
        if self.engine is None or peer not in self.engine.linked:
            return 0.0
        return self.around.true_seconds() - self.linked_at[peer]

    @property
    def is_hostile(self) -> bool:
        """Return whether it sends, or has sent, messages that no honest peer would."""
        return self.is_liar or self.mutator is not None

    @property
    def running(self) -> PeerEngine:
        """The engine of the running process."""
        assert self.engine is not None, f"{self.name} is not running"
        return self.engine

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which others dial it."""
        return (f"/memory/{self._host}/p2p/{format_peer_id(self.peer)}",)

    @property
    def _host(self) -> int:
        return 2 if self.copied_from else 1

    @property
    def roster(self) -> Roster:
        """The roster in force at this machine."""
        roster = self.running.book.in_force
        assert roster is not None, f"{self.name} knows no roster"
        return roster

    @property
    def vectors(self) -> SimulatedIsland:
        """The island of the running process."""
        assert self.island is not None, f"{self.name} is not running"
        return self.island

    def wall(self) -> float:
        """Return what this machine's wall clock shows."""
        return self.clock.wall(self.around.true_seconds())

    def steady(self) -> float:
        """Return the reading of the clock that swarm time is based on; it counts sleep where the machine can."""
        clock, true = self.clock, self.around.true_seconds()
        return clock.boottime(true) if self.counts_sleep else clock.monotonic(true)

    def swarm_now(self) -> float:
        """Return swarm time as the running process computes it from its machine's clocks."""
        assert self.process is not None, f"{self.name} is not running"
        assert self.swarm_clock is not None
        now: float = run_in(self.process, self.swarm_clock.now)
        return now

    def height(self) -> int:
        """Return the number of entries absorbed, summed over all spans."""
        return sum(state.head.height for state in self.vectors.states.values())

    def texts(self, topic: str) -> list[str]:
        """Return its reports on a topic, as far as they are kept."""
        return [text for _, its_topic, text in self.reports if its_topic == topic]

    def lie(self, mutator: Mutator | None) -> None:
        """Send other messages than the node wants sent, from now on; None: stop doing so."""
        self.mutator, self.is_liar = mutator, True
        if self.transport is not None:
            self.transport.mutator = mutator

    # -- starting and ending

    def start(self) -> None:
        """Start a process, from the disk if it holds anything; on a full disk the process ends at once."""
        assert not self.runs, f"{self.name} runs already"
        process = Process(self.clock)
        self.lives += 1
        try:
            run_in(process, self._start, process)
        except StateError as error:
            self.around.note(self, "ends", str(error))
            process.end()
            self._forget()

    def _start(self, process: Process) -> None:
        around = self.around
        least = int(self.wall()) if self.lives > 1 else 1
        folder = RunFolder(self.disk.path, RUN, least_incarnation=least)
        begun = self.wall() - self.steady()
        clock = SwarmClock(lambda: begun + self.steady(), wall=self.wall, offset_seconds=folder.recall_clock_offset())
        transport = around.network.simulated_transport(
            self.peer,
            run=RUN,
            believes_open=self.believes_open,
            process=process,
            limits=self.limits,
            host=self._host,
        )
        transport.mutator = self.mutator
        engine = self._make_engine(folder, transport)
        keeper = self._make_keeper(folder, transport, engine)
        archive = _KeptArchive(self, folder, process)
        folder.make_room_with(archive.make_room)
        states = archive.recall()
        saver = Saver(
            archive,
            states=self._all_states,
            is_ready=lambda: engine.ready,
            pause_seconds=self.checkpoint_seconds,
            report=self.report,
        )
        self.process, self.transport, self.engine, self.swarm_clock = process, transport, engine, clock
        self.remembers = engine.book.in_force is not None
        self.followed_at = {digest: at for digest, at in self.followed_at.items() if digest in engine.book}
        self.island = island = SimulatedIsland(
            maths=around.maths,
            spans=tuple(around.rules.span_elements),
            noise=random.Random(f"{around.seed} {self.name} {self.lives}"),
            trains=self.trains,
            step_seconds=self.step_seconds,
            now=clock.now,
            share=around.inspector.shared,
            watch=_Watch(self),
        )
        self.node = node = SwarmNode(
            engine=engine,
            transport=transport,
            replica=island,
            codecs=around.maths.codecs,
            memory=_KeptMemory(self, folder, process, died=self._fail),
            clock=clock,
            observer=self,
            manifest=MANIFEST,
            worker=_LateWorker(self),
            addresses=keeper,
            archive=archive,
        )
        if self.share is not None:
            engine.set_conditions(replace(engine.conditions, share=self.share))
        around.note(self, "starts", f"incarnation {engine.me.incarnation}")
        self._take_up(node, island, states)
        self.task = asyncio.get_running_loop().create_task(
            self._live(node, keeper, saver, folder, transport), name=self.name, context=process.context
        )
        self.task.add_done_callback(lambda task: self._ended(process, task), context=process.context)

    def _make_engine(self, folder: RunFolder, transport: SimulatedTransport) -> PeerEngine:
        me = LocalPeer(
            peer=self.peer,
            incarnation=folder.next_incarnation(),
            can_be_dialled=bool(transport.listen_addresses()),
            trains=self.trains,
            sign=signer(self.peer),
        )
        recalled = folder.recall()
        engine = _WatchedEngine(self, me=me, rules=self.around.rules, verify=verify, recalled=recalled)
        rate = self.limits.upload_bytes_per_second
        engine.set_conditions(replace(engine.conditions, upload_bytes_per_second=rate))
        return engine

    def _make_keeper(self, folder: RunFolder, transport: SimulatedTransport, engine: PeerEngine) -> LinkKeeper:
        known = {**self.first_known, **folder.recall_addresses()}
        known.pop(self.peer, None)
        return LinkKeeper(
            transport=transport,
            directory=self.around.directory,
            record=lambda: self._record(transport),
            known=known,
            unix_seconds=self.wall,
            report=self.report,
            wanted=engine.wanted_links,
            is_stranger=engine.is_unknown,
        )

    def _record(self, transport: SimulatedTransport) -> PeerRecord:
        addresses = transport.listen_addresses()
        return sign_record(
            self.key,
            run=RUN,
            addresses=addresses,
            can_be_dialled=bool(addresses),
            role=PeerRole.TRAINER if self.trains else PeerRole.BOOTSTRAP,
            issued_at=self.wall(),
        )

    def _take_up(self, node: SwarmNode, island: SimulatedIsland, states: dict[SpanId, SpanState] | None) -> None:
        """Start from the disk, found the run, or start with nothing and fetch."""
        around, book = self.around, node.engine.book
        if states is not None:
            around.inspector.started(self, states)
            self._hold(node, {span: around.inspector.shared(span, state) for span, state in states.items()})
            return
        around.inspector.started(self, {})
        if self.founds and (book.in_force is None or book.in_force.k == 0):
            cycle = around.rules.clock.cycle(around.rules.clock.round_at(self.swarm_now()))
            founding = book.chain()[0] if book.in_force is not None else None
            founding = founding or found_run(around.rules, node.engine.me.member(), max(cycle, 0))
            start = start_states(around.rules, founding.roster)
            around.inspector.founded(start)
            self._hold(node, start)
            node.found(founding)

    def _hold(self, node: SwarmNode, states: dict[SpanId, SpanState]) -> None:
        self.vectors.hold(states)
        node.engine.hold_state({span: state.head for span, state in states.items()})

    def _all_states(self) -> dict[SpanId, SpanState] | None:
        states = self.vectors.states
        return dict(states) if len(states) == len(self.around.rules.span_elements) else None

    async def _live(
        self, node: SwarmNode, keeper: LinkKeeper, saver: Saver, folder: RunFolder, transport: SimulatedTransport
    ) -> None:
        async with transport, asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run(), name=f"{self.name}: swarm")
            tasks.create_task(keeper.run(), name=f"{self.name}: links")
            tasks.create_task(self._look_after(node, keeper, folder), name=f"{self.name}: status")
            tasks.create_task(saver.run(), name=f"{self.name}: checkpoints")

    async def _look_after(self, node: SwarmNode, keeper: LinkKeeper, folder: RunFolder) -> None:
        """Drop the initial state once others hold it, and keep addresses and the clock offset, as a session does."""
        remembered: dict[PeerId, tuple[str, ...]] = {}
        kept_offset = 0.0
        while True:
            if not self.trains and node.engine.holds_needlessly(self.swarm_now()):
                self.vectors.drop()
                node.engine.drop_state()
            if keeper.known != remembered:
                remembered = dict(keeper.known)
                try:
                    folder.keep_addresses(remembered)
                except StateError as error:
                    self.report("addresses", str(error))
            clock = self.swarm_clock
            if clock is not None and clock.is_settled and abs(clock.wall_offset_seconds - kept_offset) > 0.05:
                kept_offset = clock.wall_offset_seconds
                folder.keep_clock_offset(kept_offset)
            await asyncio.sleep(STATUS_SECONDS)

    def end(self, reason: str) -> asyncio.Task[None] | None:
        """End the process as kill -9 does; return the task that is being torn down."""
        task, process = self.task, self.process
        if process is None or task is None:
            return None
        process.is_dying = True
        self.around.note(self, reason, "")
        if self.transport is not None:
            self.transport.end(f"{short_peer_id(self.peer)} closed the connection")
        task.cancel()
        if process.is_stopped:
            process.go_on()  # tasks that wait to be woken could not be torn down
            self.around.network.wake(self.peer)
        self._forget()
        return task

    def _forget(self) -> None:
        self.engine = self.island = self.node = self.transport = self.process = self.task = self.swarm_clock = None

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        process.end()
        error = None if task.cancelled() else task.exception()
        if error is not None and not process.is_dying:
            self.around.failed(self, error)

    def _fail(self, error: StateError) -> None:
        """End as a session does when its disk refuses what the peer must keep."""
        self.around.failed(self, error)

    # -- the observer of the node

    def report(self, topic: str, text: str) -> None:
        """Keep a report of the node. Giving up a branch allows spans to go back."""
        around = self.around
        self.reports.append((around.true_seconds() - ROUND_ZERO, topic, text))
        self.topics.add(topic)
        around.note(self, topic, text)
        if topic == "ready":
            self.ready_at = around.true_seconds()
        if topic == "branch":
            around.inspector.branch_given_up(self)
        if topic == "adoption":
            around.inspector.span_given_up(self, text)

    def round_closed(self, closed: RoundClosed) -> None:
        """Keep the outcome of a round."""
        self.closed.append(closed)


class _WatchedEngine(PeerEngine):
    """An engine whose public methods the inspector observes."""

    def __init__(self, machine: Machine, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._machine = machine
        self._reach = SimulatedReach(machine)

    def link_up(self, peer: PeerId) -> None:
        super().link_up(peer)
        self._machine.linked_at[peer] = self._machine.around.true_seconds()

    def tick(self, now: float) -> list[Action]:
        self._reach.look(self, now)
        actions = super().tick(now)
        inspector = self._machine.around.inspector
        inspector.opened(self._machine, self, actions)
        inspector.ticked(self._machine, self, now)
        return actions

    def take_result(self, result: Result, now: float) -> list[Action]:
        actions = super().take_result(result, now)
        if isinstance(result, FragmentContribution):
            self._machine.around.inspector.opened(self._machine, self, actions)
        return actions


@dataclass(frozen=True, slots=True)
class _Watch:
    """Forwards an island's events to the inspector, with its machine."""

    machine: Machine

    def complain(self, invariant: str, text: str) -> None:
        self.machine.around.inspector._broken(invariant, text, self.machine)

    def advancing(self, before: SpanState, update: SpanUpdate) -> None:
        self.machine.around.inspector.advancing(self.machine, before, update)

    def advanced(self, before: SpanState, update: SpanUpdate, after: SpanState) -> None:
        self.machine.around.inspector.advanced(self.machine, update.span, after)

    def replaced(self, span: SpanId, before: SpanState | None, after: SpanState) -> None:
        self.machine.around.inspector.replaced(self.machine, span, before, after)

    def contributed(self, contribution: FragmentContribution) -> None:
        self.machine.around.inspector.contributed(self.machine, contribution)


class _KeptMemory:
    """A `PeerMemory` on the machine's disk; writes of a process that has been killed are dropped."""

    def __init__(
        self, machine: Machine, folder: RunFolder, process: Process, *, died: Callable[[StateError], None]
    ) -> None:
        self._machine = machine
        self._memory = WatchedMemory(folder, died, soon=self._write_soon)
        self._process = process

    def keep_ballots(self, ballots: Ballots) -> None:
        if not self._process.is_dying:
            self._memory.keep_ballots(ballots)

    def keep_roster(self, certified: CertifiedRoster) -> None:
        if not self._process.is_dying:
            self._memory.keep_roster(certified)
            machine = self._machine
            machine.followed_at.setdefault(certified.roster.digest(), machine.around.true_seconds())
            machine.around.inspector.roster_kept(machine, certified)

    def keep_activity(self, activity: Activity) -> None:
        self._memory.keep_activity(activity)

    def _write_soon(self, write: Callable[[], None]) -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: None if self._process.is_dying else write())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """The part of a run plan that an archive needs."""

    rules: RunRules
    codecs: Codecs
    outer: OuterRule


class _KeptArchive(Archive):
    """The archive on the machine's disk, written as soon as that disk has time."""

    def __init__(self, machine: Machine, folder: RunFolder, process: Process) -> None:
        rules, maths = machine.around.rules, machine.around.maths
        super().__init__(
            folder.path,
            plan=_Replayed(rules=rules, codecs=maths.codecs, outer=OUTER),
            keep=KEEP_CHECKPOINTS,
            soon=lambda write: asyncio.get_running_loop().run_in_executor(None, write),
            report=machine.report,
        )
        self._machine = machine
        self._process = process

    def keep_entry(self, entry: Entry) -> None:
        self._machine.around.inspector.entry_kept(self._machine, entry)
        super().keep_entry(entry)

    def _write_all(self) -> None:
        if not self._process.is_dying:
            super()._write_all()


class _LateWorker:
    """A `Worker` without a thread: it computes at once, and delivers results at once or late."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rng = random.Random(f"{machine.around.seed} {machine.name} {machine.lives} works")
        self._free_at = 0.0

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` now; the loop calls `done` with the result, in order."""
        loop = asyncio.get_running_loop()
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except Exception as mistake:
            error = mistake
        if self._machine.reduce_seconds <= 0.0:
            loop.call_soon(done, result, error)
            return
        at = max(self._free_at, loop.time() + self._rng.random() * self._machine.reduce_seconds)
        self._free_at = at
        loop.call_at(at, done, result, error)
