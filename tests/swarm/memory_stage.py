"""Real peers without processes: `SwarmNode`, `LinkKeeper` and engine of each over one memory network, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.swarm.fake_island import CODECS, OPTIMA, SPAN_ELEMENTS, FakeIsland

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.outer.state import SpanState, content_digest, genesis_state
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.membership import Self
from p2p_diloco.protocol.roster import (
    CertifiedRoster,
    Goodbye,
    Member,
    Roster,
    founding_roster,
    founding_statement,
)
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.signing import SigningKey
from p2p_diloco.swarm.clock_sync import SwarmClock
from p2p_diloco.swarm.link_keeper import LinkKeeper
from p2p_diloco.swarm.node import SwarmNode
from p2p_diloco.swarm.vector_work import state_bytes
from p2p_diloco.transport.directory import MemoryDirectory, PeerRecord, PeerRole, sign_record
from p2p_diloco.transport.memory import MemoryNetwork, MemoryTransport
from p2p_diloco.transport.virtual_time import VirtualTimeLoop

RUN = sha256(b"a run in memory")
START_SECONDS = 1_000_000.0
"""Unix time at which a stage opens; round 0 begins a little later."""
MANIFEST = b"the signed manifest"


def key_of(name: str) -> SigningKey:
    return SigningKey(sha256(b"key of", name.encode()))


ORGANISER = key_of("organiser")


def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """A cheap stand-in for Ed25519, which would cost the tests half their time."""
    return sha256(b"signed by", peer, statement) * 2


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer, statement)


def run_rules(
    *, round_seconds: float = 16.0, heartbeat_seconds: float = 2.0, spans: int = 4, group_size: int = 32
) -> RunRules:
    num_spans = (spans, spans)
    all_spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    return RunRules(
        run=RUN,
        organiser=ORGANISER.peer,
        clock=RoundClock(
            start_seconds=START_SECONDS + round_seconds, round_seconds=round_seconds, num_fragments=len(num_spans)
        ),
        num_spans=num_spans,
        span_elements=dict.fromkeys(all_spans, SPAN_ELEMENTS),
        payload_bytes=dict.fromkeys(all_spans, CODECS.contribution.encoded_bytes(SPAN_ELEMENTS)),
        entry_bytes=dict.fromkeys(all_spans, CODECS.entry.encoded_bytes(SPAN_ELEMENTS)),
        group_size=group_size,
        void_cycles=8,
        heartbeat_seconds=heartbeat_seconds,
        weight_clip=4.0,
        contribution_limit=2.0,
        entry_limit=3.0,
        retained_cycles=16,
    )


def start_states(rules: RunRules, founding: Roster) -> dict[SpanId, SpanState]:
    return {span: genesis_state(OPTIMA[span] * 0, founding.digest()) for span in rules.span_elements}


def found_run(rules: RunRules, founder: Member) -> CertifiedRoster:
    start_N = OPTIMA[SpanId(0, 0)] * 0
    genesis = sha256(*(content_digest(start_N, start_N, ZERO_DIGEST) for _ in rules.span_elements))
    roster = founding_roster(rules.run, genesis, founder)
    signature = sign_as(ORGANISER.peer, founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER.peer, signature),))


@dataclass
class Disk:
    """What survives a restart; a `PeerMemory`."""

    incarnation: int = 0
    rosters: list[CertifiedRoster] = field(default_factory=list)
    ballots: Ballots = NO_BALLOTS
    goodbye: Goodbye | None = None
    checkpoint: dict[SpanId, SpanState] = field(default_factory=dict)

    def keep_ballots(self, ballots: Ballots) -> None:
        self.ballots = ballots

    def keep_goodbye(self, goodbye: Goodbye) -> None:
        self.goodbye = goodbye

    def keep_roster(self, certified: CertifiedRoster) -> None:
        self.rosters.append(certified)


@dataclass
class Machine:
    """One peer with its disk, its island and what it has reported; a `SwarmObserver`."""

    name: str
    dialable: bool
    trains: bool
    step_seconds: float
    clock_offset: float
    disk: Disk = field(default_factory=Disk)
    reports: list[tuple[float, str, str]] = field(default_factory=list)
    closed: list[RoundClosed] = field(default_factory=list)
    island: FakeIsland | None = None
    node: SwarmNode | None = None
    transport: MemoryTransport | None = None
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> SigningKey:
        return key_of(self.name)

    @property
    def peer(self) -> PeerId:
        return self.key.peer

    @property
    def running(self) -> SwarmNode:
        assert self.node is not None, f"{self.name} is not running"
        return self.node

    @property
    def engine(self) -> PeerEngine:
        return self.running.engine

    def report(self, topic: str, text: str) -> None:
        self.reports.append((asyncio.get_running_loop().time() - START_SECONDS, topic, text))

    def round_closed(self, closed: RoundClosed) -> None:
        self.closed.append(closed)

    def texts(self, topic: str) -> list[str]:
        return [text for _, its_topic, text in self.reports if its_topic == topic]

    def height(self) -> int:
        assert self.island is not None
        return sum(state.head.height for state in self.island.states.values())

    def digest(self) -> str:
        """Return SHA-256 over φ and m of all spans, as the trainer's session says it at the end."""
        assert self.island is not None
        self.island.settle()
        return sha256(*(state_bytes(state) for _, state in sorted(self.island.states.items()))).hex()


class MemorySwarm:
    """All machines, one network, one noticeboard, one seed. Make it in a `VirtualTimeLoop`."""

    def __init__(self, *, seed: int, rules: RunRules | None = None, loss: float = 0.0) -> None:
        self.rules = rules if rules is not None else run_rules()
        self.network = MemoryNetwork(seed, delay_seconds=(0.01, 0.1), loss=loss)
        self.machines: dict[str, Machine] = {}
        self.asleep_seconds = 0.0
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        self._directory = MemoryDirectory(self.unix_seconds)

    def unix_seconds(self) -> float:
        """Return true Unix time; the loop's clock may have stood still while all machines slept."""
        return self._loop.time() + self.asleep_seconds

    @property
    def round(self) -> int:
        return self.rules.clock.round_at(self.unix_seconds())

    # -- machines

    def add(
        self,
        name: str,
        *,
        dialable: bool = True,
        trains: bool = True,
        founds: bool = False,
        step_seconds: float = 1.0,
        clock_offset: float = 0.0,
    ) -> Machine:
        machine = Machine(
            name=name, dialable=dialable, trains=trains, step_seconds=step_seconds, clock_offset=clock_offset
        )
        self.machines[name] = machine
        self.start(name, founds=founds)
        return machine

    def start(self, name: str, *, founds: bool = False) -> None:
        """Start a machine, for the first time or again from its disk."""
        machine = self.machines[name]
        machine.disk.incarnation += 1
        clock = SwarmClock(lambda: self.unix_seconds() + machine.clock_offset)
        machine.transport = self.network.transport(machine.peer, run=RUN, can_be_dialled=machine.dialable)
        machine.island = FakeIsland(
            spans=tuple(self.rules.span_elements),
            now=clock.now,
            seed=int.from_bytes(sha256(b"%d %d" % (self._seed, machine.disk.incarnation), machine.peer)[:8], "big"),
            step_seconds=machine.step_seconds,
            trains=machine.trains,
        )
        machine.node = SwarmNode(
            engine=self._make_engine(machine),
            transport=machine.transport,
            replica=machine.island,
            codecs=CODECS,
            memory=machine.disk,
            clock=clock,
            observer=machine,
            manifest=MANIFEST,
            worker=None,
        )
        if founds:
            founding = found_run(self.rules, machine.engine.me.member())
            self._hold(machine, start_states(self.rules, founding.roster))
            machine.node.found(founding)
        elif machine.disk.checkpoint:
            self._hold(machine, machine.disk.checkpoint)
        machine.task = asyncio.ensure_future(self._live(machine))

    def _make_engine(self, machine: Machine) -> PeerEngine:
        peer, disk = machine.peer, machine.disk
        me = Self(
            peer=peer,
            incarnation=disk.incarnation,
            can_be_dialled=machine.dialable,
            trains=machine.trains,
            sign=lambda statement: sign_as(peer, statement),
        )
        recalled = Recalled(rosters=tuple(disk.rosters), ballots=disk.ballots, goodbye=disk.goodbye)
        return PeerEngine(me=me, rules=self.rules, verify=verify, recalled=recalled)

    def _hold(self, machine: Machine, states: dict[SpanId, SpanState]) -> None:
        assert machine.island is not None
        for span, state in states.items():
            machine.island.replace(span, state)
        machine.island.settle()
        machine.engine.hold_state({span: state.head for span, state in states.items()})

    async def _live(self, machine: Machine) -> None:
        assert machine.transport is not None
        keeper = LinkKeeper(
            transport=machine.transport,
            directory=self._directory,
            record=lambda: self._record(machine),
            known={},
            unix_seconds=self.unix_seconds,
            hear=machine.report,
        )
        async with machine.transport, asyncio.TaskGroup() as tasks:
            tasks.create_task(machine.running.run(), name=f"{machine.name}: swarm")
            tasks.create_task(keeper.run(), name=f"{machine.name}: links")
            if not machine.trains:
                tasks.create_task(self._drop_start(machine), name=f"{machine.name}: start")

    def _record(self, machine: Machine) -> PeerRecord:
        assert machine.transport is not None
        return sign_record(
            machine.key,
            run=RUN,
            addresses=machine.transport.listen_addresses(),
            can_be_dialled=machine.dialable,
            role=PeerRole.TRAINER if machine.trains else PeerRole.BOOTSTRAP,
            issued_at=self.unix_seconds(),
        )

    async def _drop_start(self, machine: Machine) -> None:
        """Let a bootstrap hold the start until others do, as the trainer's session does."""
        while True:
            await asyncio.sleep(1.0)
            engine = machine.engine
            roster = engine.book.in_force
            others = any(beat.ready for beat in engine.membership.alive(self.unix_seconds()).values())
            if roster is not None and roster.k > 0 and others and engine.serves_state and not engine.is_hub:
                assert machine.island is not None
                machine.island.drop()
                engine.drop_state()

    # -- going

    async def leave(self, name: str) -> None:
        """Let a machine say good-bye, finish the round, checkpoint and go."""
        machine = self.machines[name]
        machine.running.leave()
        await self.run_to_round(self.round + 1)
        assert machine.island is not None
        machine.island.settle()
        machine.disk.checkpoint = dict(machine.island.states)
        await self.kill(name)

    async def kill(self, name: str) -> None:
        """End a machine as kill -9 does."""
        machine = self.machines[name]
        assert machine.task is not None
        assert machine.island is not None
        if machine.task.done():
            await machine.task  # it failed before: say why
        self.network.kill(machine.peer)
        machine.task.cancel()
        machine.island.stop()
        await asyncio.wait({machine.task})
        machine.node, machine.task = None, None

    async def close(self) -> None:
        """End all machines; one that failed on its own raises here."""
        for machine in self.machines.values():
            if machine.node is not None:
                await self.kill(machine.name)

    # -- time

    async def run(self, seconds: float) -> None:
        """Let time pass, unless a machine fails."""
        tasks = [machine.task for machine in self.machines.values() if machine.task is not None]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def run_to_round(self, round_index: int) -> None:
        await self.run(self.rules.clock.begin(round_index) - self.unix_seconds())

    async def until(self, claim: Callable[[], bool], within: float) -> float:
        """Wait until `claim` holds; return how long it took."""
        begin = self.unix_seconds()
        while not claim():
            assert self.unix_seconds() - begin <= within, f"not within {within} s\n{self.describe()}"
            await self.run(1.0)
        return self.unix_seconds() - begin

    async def sleep_for(self, seconds: float, *, loop_counts: bool) -> None:
        """Suspend all machines at once; `loop_counts` tells whether their monotonic clocks go on meanwhile."""
        if loop_counts:
            assert isinstance(self._loop, VirtualTimeLoop)
            self._loop.advance(seconds)
        else:
            self.asleep_seconds += seconds
        await asyncio.sleep(0)

    # -- claims

    def living(self, names: Iterable[str] | None = None) -> list[Machine]:
        return [m for m in self.machines.values() if m.node is not None and m.trains and (not names or m.name in names)]

    def all_members(self) -> bool:
        """Tell whether all that live and train are ready, under one roster that lists them and nobody else."""
        wanted = {(m.peer, m.disk.incarnation) for m in self.living()}
        rosters = [m.engine.book.in_force for m in self.living()]
        return all(
            roster is not None and {(x.peer, x.incarnation) for x in roster.members} == wanted for roster in rosters
        ) and all(m.engine.ready for m in self.living())

    def agreed(self) -> bool:
        """Tell whether all that live hold the same bytes."""
        machines = [m for m in self.living() if m.engine.ready]
        return len({m.digest() for m in machines}) == 1

    async def finish(self, *, rounds: int = 4, within_rounds: int = 6) -> str:
        """Let all stop contributing some rounds from now, wait until they agree, and return the digest."""
        last = self.round + rounds
        for machine in self.living():
            machine.engine.last_round = last
        await self.run_to_round(last + 1)
        await self.until(self.agreed, within_rounds * self.rules.clock.round_seconds)
        return self.living()[0].digest()

    async def grows(self, name: str, *, entries: int = 8, within: float = 300.0) -> None:
        """Wait until training goes on at a machine."""
        height = self.machines[name].height()
        await self.until(lambda: self.machines[name].height() >= height + entries, within)

    def describe(self) -> str:
        lines = [f"t={self.unix_seconds() - START_SECONDS:.1f} round {self.round}"]
        for machine in self.machines.values():
            if machine.node is None:
                lines.append(f"  {machine.name}: not running")
                continue
            engine = machine.engine
            roster = engine.book.in_force
            by_peer = {m.peer: m.name for m in self.machines.values()}
            names = sorted(by_peer.get(m.peer, short_peer_id(m.peer)) for m in roster.members) if roster else []
            lines.append(
                f"  {machine.name}: k={roster.k if roster else None} {' '.join(names)} ready={engine.ready} "
                f"height={machine.height()} links={len(engine.linked)} void={engine.membership.void_cycles} "
                f"{machine.reports[-3:]}"
            )
        return "\n".join(lines)


def play(scene: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scene in virtual time, from `START_SECONDS` on."""

    async def whole() -> Any:
        return await scene()

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(START_SECONDS)) as runner:
        return runner.run(whole())


def distance_to_optimum(machine: Machine) -> float:
    """Return ‖φ − optimum‖ / ‖optimum‖ over all spans."""
    assert machine.island is not None
    missing = sum(float(((state.anchor_N - OPTIMA[span]) ** 2).sum()) for span, state in machine.island.states.items())
    whole = sum(float((OPTIMA[span] ** 2).sum()) for span in machine.island.states)
    return (missing / whole) ** 0.5


def genesis_digest_of(swarm: MemorySwarm) -> Digest:
    """Return the digest of the founding roster, for tests that forge."""
    roster = next(m.engine.book.chain()[0].roster for m in swarm.machines.values() if m.node is not None)
    return roster.digest()
