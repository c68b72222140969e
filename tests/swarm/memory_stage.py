"""Peers without processes: `SwarmNode`, `LinkKeeper` and engine of each over one memory network, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from p2p_diloco.ids import SpanId, sha256, short_peer_id
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.attendance import Self
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.roster import Roster
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.clock_sync import SwarmClock
from p2p_diloco.swarm.link_keeper import LinkKeeper
from p2p_diloco.swarm.node import SwarmNode
from p2p_diloco.swarm.vector_worker import AtOnce
from p2p_diloco.transport.directory import MemoryDirectory, PeerRecord, PeerRole, sign_record
from p2p_diloco.transport.link import TransportLimits
from p2p_diloco.transport.memory import MemoryNetwork
from p2p_diloco.transport.virtual_time import VirtualTimeLoop
from tests.swarm.fake_island import CODECS, FakeIsland
from tests.swarm.memory_machine import (
    MANIFEST,
    RUN,
    START_SECONDS,
    Machine,
    found_run,
    run_rules,
    sign_as,
    start_states,
    verify,
)

JUST = 1e-3
_T = TypeVar("_T")


class MemorySwarm:
    """All machines, one network, one noticeboard, one seed. Make it in a `VirtualTimeLoop`."""

    def __init__(self, *, seed: int, rules: RunRules | None = None, loss: float = 0.0) -> None:
        self.rules = rules if rules is not None else run_rules()
        self.network = MemoryNetwork(seed, delay_seconds=(0.01, 0.1), loss=loss)
        self.machines: dict[str, Machine] = {}
        self.asleep_seconds = 0.0
        self.last_rosters: list[Roster] = []
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
        limits: TransportLimits | None = None,
    ) -> Machine:
        machine = Machine(
            name=name,
            dialable=dialable,
            trains=trains,
            step_seconds=step_seconds,
            clock_offset=clock_offset,
            limits=limits if limits is not None else TransportLimits(),
        )
        self.machines[name] = machine
        self.start(name, founds=founds)
        return machine

    def start(self, name: str, *, founds: bool = False) -> None:
        """Start a machine, for the first time or again from its disk."""
        machine = self.machines[name]
        machine.disk.incarnation += 1
        machine.clock_offset, machine.wall_step = machine.clock_offset + machine.wall_step, 0.0
        clock = machine.clock = SwarmClock(
            lambda: self.unix_seconds() + machine.clock_offset,
            wall=lambda: self.unix_seconds() + machine.clock_offset + machine.wall_step,
            offset_seconds=machine.disk.clock_offset,
        )
        machine.transport = self.network.transport(
            machine.peer, run=RUN, can_be_dialled=machine.dialable, limits=machine.limits
        )
        machine.keeper = self._make_keeper(machine)
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
            worker=AtOnce(),
            addresses=machine.keeper,
            archive=machine.disk,
        )
        if founds:
            founding = found_run(self.rules, machine.engine.me.member())
            self._hold(machine, start_states(self.rules, founding.roster))
            machine.node.found(founding)
        elif machine.disk.checkpoint:
            self._hold(machine, {span: machine.disk.replayed(span) for span in machine.disk.checkpoint})
        machine.task = asyncio.ensure_future(self._live(machine))

    def _make_keeper(self, machine: Machine) -> LinkKeeper:
        assert machine.transport is not None
        return LinkKeeper(
            transport=machine.transport,
            directory=self._directory,
            record=lambda: self._record(machine),
            known={},
            unix_seconds=self.unix_seconds,
            hear=machine.report,
            wanted=lambda announced: machine.engine.wanted_links(announced),
        )

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
        engine = PeerEngine(me=me, rules=self.rules, verify=verify, recalled=recalled)
        engine.exchange.ration.bytes_per_second = machine.limits.upload_bytes_per_second
        return engine

    def _hold(self, machine: Machine, states: dict[SpanId, SpanState]) -> None:
        assert machine.island is not None
        for span, state in states.items():
            machine.island.replace(span, state)
        machine.island.settle()
        machine.engine.hold_state({span: state.head for span, state in states.items()})

    async def _live(self, machine: Machine) -> None:
        assert machine.transport is not None
        assert machine.keeper is not None
        async with machine.transport, asyncio.TaskGroup() as tasks:
            tasks.create_task(machine.running.run(), name=f"{machine.name}: swarm")
            tasks.create_task(machine.keeper.run(), name=f"{machine.name}: links")
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
            if engine.holds_needlessly(self.unix_seconds()):
                assert machine.island is not None
                machine.island.drop()
                engine.drop_state()

    # -- going

    async def leave(self, name: str) -> None:
        """Let a machine say good-bye, finish the round, checkpoint and go."""
        machine = self.machines[name]
        machine.running.leave()
        await self.run_to_round(self.round + 1)
        self.save(name)
        await self.kill(name)

    def save(self, name: str) -> None:
        """Let a machine keep its spans on its disk."""
        machine = self.machines[name]
        assert machine.island is not None
        machine.island.settle()
        machine.disk.checkpoint = dict(machine.island.states)

    async def kill(self, name: str) -> None:
        """End a machine as kill -9 does."""
        machine = self.machines[name]
        assert machine.task is not None
        assert machine.island is not None
        if machine.task.done():
            await machine.task  # it failed before: say why
        assert machine.clock is not None
        machine.disk.clock_offset = machine.clock.wall_offset_seconds
        self.network.kill(machine.peer)
        machine.task.cancel()
        machine.island.stop()
        await asyncio.wait({machine.task})
        machine.node, machine.task = None, None

    async def break_links(self) -> None:
        """Lose every link at once."""
        for machine in self.machines.values():
            if machine.transport is not None and machine.node is not None:
                for peer in sorted(machine.transport.linked_peers()):
                    machine.transport.hang_up(peer)
        await asyncio.sleep(0)

    async def close(self) -> None:
        """End all machines; one that failed on its own raises here."""
        self.last_rosters = [m.engine.book.in_force for m in self.living() if m.engine.book.in_force is not None]
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
        """Let time pass until a round has just begun."""
        await self.run(self.rules.clock.begin(round_index) - self.unix_seconds() + JUST)

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

    def living(self) -> list[Machine]:
        """Return the machines that run and train."""
        return [machine for machine in self.machines.values() if machine.node is not None and machine.trains]

    def all_members(self) -> bool:
        """Tell whether all that live and train are ready, under one roster that lists them and nobody else."""
        wanted = {(m.peer, m.disk.incarnation) for m in self.living()}
        rosters = [m.engine.book.in_force for m in self.living()]
        return all(
            roster is not None and {(x.peer, x.incarnation) for x in roster.members} == wanted for roster in rosters
        ) and all(m.engine.ready for m in self.living())

    def agreed(self) -> bool:
        """Tell whether all that live are ready and hold the same bytes."""
        machines = self.living()
        return all(machine.engine.ready for machine in machines) and len({m.digest() for m in machines}) == 1

    async def finish(self, *, rounds: int = 4, within_rounds: int = 8) -> str:
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


def play(scene: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a scene in virtual time, from `START_SECONDS` on."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(START_SECONDS)) as runner:
        return runner.run(scene())
