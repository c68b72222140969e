"""Wrong clocks and lies about the time, through the real shell: who moves swarm time, and by how much."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.messages import Ping, Pong, decode_message, encode_message
from p2p_diloco.transport.link import Lane, SilentListener
from p2p_diloco.transport.memory import MemoryTransport
from tests.swarm.memory_machine import RUN, Machine, key_of
from tests.swarm.memory_stage import MemorySwarm, play

DAY = 86_400.0


class ClockLiar(SilentListener):
    """A stranger that answers each ping at once, and sends as many unasked answers, with whatever time it likes."""

    def __init__(self, transport: MemoryTransport, says: Callable[[], float]) -> None:
        self._transport = transport
        self._says = says
        transport.listener = self

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
        message = decode_message(frame)
        nonces = (message.nonce,) if isinstance(message, Ping) else range(1, 9)
        for nonce in nonces:
            pong = encode_message(Pong(nonce=nonce, clock_seconds=self._says()))
            self._transport.post(peer, pong, lane=Lane.CONTROL, deadline=asyncio.get_running_loop().time() + 5.0)


async def link_liars(exits: AsyncExitStack, swarm: MemorySwarm, target: Machine, says: list[float]) -> None:
    """Let strangers link to `target`, one for each time by which it lies; a time beyond reason is said as it is."""
    loop = asyncio.get_running_loop()
    for number, ahead in enumerate(says):
        transport = swarm.network.transport(key_of(f"stranger {number}").peer, run=RUN, can_be_dialled=False)
        ClockLiar(transport, lambda ahead=ahead: ahead if abs(ahead) > 1e12 else swarm.unix_seconds() + ahead)
        await exits.enter_async_context(transport)
        assert target.transport is not None
        await transport.dial(target.peer, target.transport.listen_addresses(), loop.time() + 5.0)


def swarm_offset(swarm: MemorySwarm, machine: Machine) -> float:
    """Return how far swarm time at a machine is from true time."""
    return seconds(machine) - swarm.unix_seconds()


def seconds(machine: Machine) -> float:
    assert machine.clock is not None
    return machine.clock.now()


@pytest.mark.parametrize("said", [DAY, 1e300, -1e300], ids=["a day ahead", "1e300", "-1e300"])
def test_eight_strangers_that_answer_pings_move_nothing_and_a_lone_founder_goes_on(said: float) -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=4)
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        async with AsyncExitStack() as exits:
            await link_liars(exits, swarm, founder, [said] * 8)
            await swarm.run(30.0)
            assert swarm_offset(swarm, founder) == 0.0
            await swarm.grows("founder")
        await swarm.close()

    play(scene)


@pytest.mark.parametrize("ahead", [DAY, -DAY, 300.0, -300.0, 1.5e9])
def test_a_joiner_whose_clock_is_wrong_takes_the_founders_time_and_the_founder_does_not_move(ahead: float) -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=5)
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        joiner = swarm.add("joiner", clock_offset=ahead)
        await swarm.until(swarm.all_members, within=180.0)
        for _ in range(30):
            await swarm.run(2.0)
            assert abs(swarm_offset(swarm, founder)) < 0.2
            assert abs(swarm_offset(swarm, joiner)) < 0.2
        await swarm.grows("joiner")
        await swarm.finish()
        await swarm.close()

    play(scene)


def test_one_lying_member_among_four_moves_swarm_time_no_further_than_honest_clocks_are_apart() -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=6)
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(4):
            swarm.add(f"p{number}", clock_offset=0.02 * number)
        await swarm.until(swarm.all_members, within=180.0)
        swarm.machines["p3"].clock_offset = DAY
        honest = [swarm.machines[name] for name in ("p0", "p1", "p2")]
        for _ in range(40):
            await swarm.run(1.0)
            assert all(-0.1 < swarm_offset(swarm, machine) < 0.2 for machine in honest)
        swarm.machines["p3"].clock_offset = 0.06
        await swarm.close()

    play(scene)


@pytest.mark.parametrize("step", [20.0, -20.0])
def test_of_two_whose_clocks_part_none_sees_time_step_back(step: float) -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=7)
        first = swarm.add("first", founds=True)
        second = swarm.add("second")
        await swarm.until(swarm.all_members, within=180.0)
        second.clock_offset = step
        last = [-math.inf, -math.inf]
        for _ in range(400):
            await swarm.run(0.25)
            now = [seconds(first), seconds(second)]
            assert all(before < after for before, after in zip(last, now, strict=True))
            last = now
        assert abs(last[0] - last[1]) < 0.2, "they meet all the same"
        await swarm.grows("first")
        await swarm.close()

    play(scene)


def test_a_swarm_whose_bootstrap_has_a_wrong_clock_goes_on_by_the_bootstraps_time_line() -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=8)
        bootstrap = swarm.add("bootstrap", trains=False, founds=True, clock_offset=600.0)
        await swarm.run(1.0)
        volunteer = swarm.add("volunteer")
        await swarm.until(swarm.all_members, within=180.0)
        await swarm.grows("volunteer")
        assert abs(swarm_offset(swarm, volunteer) - 600.0) < 0.2
        bootstrap.clock_offset = 0.0
        await swarm.grows("volunteer", entries=32)
        assert abs(swarm_offset(swarm, volunteer) - 600.0) < 0.2
        await swarm.close()

    play(scene)
