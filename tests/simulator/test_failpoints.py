"""A failpoint kills or stops exactly the process that reaches it, exactly there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire.messages import Heartbeat, Message, Ping, decode_message, encode_message
from p2p_diloco.storage import checkpoint
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.transport.link import Lane
from simulator.failpoints import ArmedFailpoint, Call, Failpoint, Kind
from simulator.network import SimulatedTransport
from simulator.simulation import Simulation


@asynccontextmanager
async def grown_swarm() -> AsyncIterator[Simulation]:
    async with Simulation(seed=1, as_bytes=False) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1")
        swarm.add("p2")
        await swarm.until(swarm.all_ready, within=120.0)
        yield swarm


def sends(kind: type, name: str) -> Callable[[Call], bool]:
    return lambda call: isinstance(call.message, kind) and call.machine.name == name


async def until_failed(swarm: Simulation, armed: ArmedFailpoint) -> None:
    await swarm.until(lambda: armed.machine is not None, within=120.0, step=0.01)


@pytest.mark.parametrize("is_after", [False, True])
async def test_killed_process_has_sent_its_message_only_if_it_fails_afterwards(is_after: bool) -> None:
    async with grown_swarm() as swarm:
        received: list[bytes] = []
        victim = swarm.machines["p1"].peer

        def note(sender: PeerId, to: PeerId, lane: Lane, frame: bytes) -> None:
            if sender == victim and isinstance(decode_message(frame), Heartbeat):
                received.append(frame)

        swarm.network.tap = note
        counts = sends(Heartbeat, "p1")
        point = Failpoint(owner=SimulatedTransport, name="post", counts=counts, is_after=is_after)
        armed = ArmedFailpoint(swarm, point, Kind.KILLED)
        with armed.armed():
            await until_failed(swarm, armed)
            failed_at = swarm.now
            assert not swarm.machines["p1"].runs
            received.clear()
            await swarm.run(1.0)
        assert swarm.now > failed_at
        assert bool(received) == is_after


async def test_stopped_process_sends_late_what_it_was_about_to_send() -> None:
    async with grown_swarm() as swarm:
        received: list[bytes] = []
        asked: list[Message] = []
        victim = swarm.machines["p1"].peer
        swarm.network.tap = lambda sender, to, lane, frame: received.append(frame) if sender == victim else None

        def counts(call: Call) -> bool:
            if isinstance(call.message, Ping) and call.machine.peer == victim:
                asked.append(call.message)
            return bool(asked)

        armed = ArmedFailpoint(swarm, Failpoint(owner=SimulatedTransport, name="post", counts=counts), Kind.STOPPED)
        with armed.armed():
            await until_failed(swarm, armed)
            await swarm.run(1.0)  # what was sent before arrives
            received.clear()
            await swarm.run(30.0)
            assert received == []
            armed.go_on()
            await swarm.run(0.2)
        assert encode_message(asked[0]) in received
        assert swarm.machines["p1"].lives == 1


async def test_killed_process_leaves_half_a_checkpoint_and_starts_from_the_one_before() -> None:
    async with grown_swarm() as swarm:
        await swarm.run(40.0)
        before = sorted(path.name for path in swarm.snapshot("p2") if "checkpoint" in path.name)
        assert before
        point = Failpoint(
            owner=checkpoint, name="write_tensors", counts=lambda call: call.machine.name == "p2", is_torn=True
        )
        armed = ArmedFailpoint(swarm, point, Kind.KILLED)
        with armed.armed():
            await until_failed(swarm, armed)
            torn = [content for path, content in armed.disk.items() if path.name.endswith(".part")]
            kept = sorted(p.name for p in armed.disk if "checkpoint" in p.name and not p.name.endswith(".part"))
            whole = max(len(content) for path, content in armed.disk.items() if path.name.endswith(".safetensors"))
            assert len(torn) == 1
            assert 0 < len(torn[0]) < whole
            await swarm.run(10.0)
            armed.start()
            assert any(path.name.endswith(".part") for path in swarm.snapshot("p2"))
            await swarm.run(0.1)
            assert swarm.machines["p2"].height() > 0
            assert kept
            await swarm.until(swarm.all_ready, within=120.0)


async def test_only_the_first_machine_fails_and_the_code_is_restored() -> None:
    right = RunFolder.keep_ballots, SimulatedTransport.post
    async with grown_swarm() as swarm:
        point = Failpoint(owner=RunFolder, name="keep_ballots", counts=lambda call: True)
        armed = ArmedFailpoint(swarm, point, Kind.KILLED)
        with armed.armed():
            await until_failed(swarm, armed)
            await swarm.run(40.0)
            assert len(swarm.running()) == 2
        assert (RunFolder.keep_ballots, SimulatedTransport.post) == right


async def test_nth_call_of_a_round_is_counted_for_each_machine() -> None:
    async with grown_swarm() as swarm:
        calls: list[tuple[str, int]] = []

        def counts(call: Call) -> bool:
            if isinstance(call.message, Heartbeat):
                calls.append((call.machine.name, swarm.round))
                return True
            return False

        point = Failpoint(owner=SimulatedTransport, name="post", counts=counts, nth=3)
        armed = ArmedFailpoint(swarm, point, Kind.STOPPED)
        with armed.armed():
            await until_failed(swarm, armed)
        assert armed.machine is not None
        assert calls.count((armed.machine.name, swarm.round)) == 3
        assert max(calls.count(place) for place in calls) == 3
