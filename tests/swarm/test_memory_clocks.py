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
from tests.swarm.memory_machine import RUN, START_SECONDS, Machine, key_of
from tests.swarm.memory_stage import MemorySwarm, play

HOUR, DAY = 3600.0, 86_400.0
NIGHT = 8 * HOUR


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


# -- one time line, whatever wall clocks show


async def running(num_peers: int, *, founder_ahead: float = 0.0) -> MemorySwarm:
    """Return a swarm with entries, two minutes old; its first peer founded it."""
    swarm = MemorySwarm(seed=3)
    swarm.add("p0", founds=True, clock_offset=founder_ahead)
    await swarm.run(1.0)
    for number in range(1, num_peers):
        swarm.add(f"p{number}")
    await swarm.until(swarm.all_members, within=300.0)
    await swarm.grows("p0")
    await swarm.run(max(125.0 - (swarm.unix_seconds() - START_SECONDS), 5.0))
    return swarm


async def restart(swarm: MemorySwarm, set_forward: dict[str, float]) -> None:
    """Kill machines, set their wall clocks forward by so many seconds, and start them again."""
    for name in set_forward:
        swarm.save(name)
        await swarm.kill(name)
    for name, seconds in set_forward.items():
        swarm.machines[name].wall_step += seconds
        swarm.start(name)


async def goes_on(swarm: MemorySwarm) -> None:
    """Wait for the next entry, which two cycles must bring, and until all are there.

    Who is alone needs longer after a start: it waits for others before it is ready, whatever the time is.
    """
    machines = list(swarm.machines.values())
    heights = [machine.height() for machine in machines]

    def grew(entries: int) -> list[bool]:
        return [machine.height() >= height + entries for machine, height in zip(machines, heights, strict=True)]

    cycle_seconds = swarm.rules.clock.num_fragments * swarm.rules.clock.round_seconds
    alone_seconds = 2 * swarm.rules.silence_seconds if len(machines) == 1 else 0.0
    await swarm.until(lambda: any(grew(1)), within=2 * cycle_seconds + alone_seconds)
    await swarm.until(lambda: all(grew(8)) and swarm.all_members(), within=4 * cycle_seconds)
    offsets = [swarm_offset(swarm, machine) for machine in machines]
    assert max(offsets) - min(offsets) < 0.3
    await swarm.close()


SIZES = pytest.mark.parametrize("num_peers", [1, 2, 3, 4])


@SIZES
@pytest.mark.parametrize("ahead", [600.0, DAY])
def test_a_founder_ahead_that_is_started_again_with_the_right_clock_keeps_the_runs_time(
    num_peers: int, ahead: float
) -> None:
    async def scene() -> None:
        swarm = await running(num_peers, founder_ahead=ahead)
        await restart(swarm, {"p0": -ahead})
        await goes_on(swarm)
        assert swarm_offset(swarm, swarm.machines["p0"]) > ahead - 2 * swarm.rules.clock.round_seconds

    play(scene)


@SIZES
@pytest.mark.parametrize("ahead", [600.0, DAY])
def test_a_founder_ahead_whose_wall_clock_is_set_right_while_it_runs_keeps_the_runs_time(
    num_peers: int, ahead: float
) -> None:
    async def scene() -> None:
        swarm = await running(num_peers, founder_ahead=ahead)
        swarm.machines["p0"].wall_step = -ahead
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, swarm.machines["p0"]) - ahead) < 0.2

    play(scene)


@SIZES
def test_a_wall_clock_that_was_set_while_a_peer_ran_is_known_at_its_next_start(num_peers: int) -> None:
    async def scene() -> None:
        swarm = await running(num_peers, founder_ahead=DAY)
        swarm.machines["p0"].wall_step = -DAY
        await swarm.run(30.0)
        await restart(swarm, dict.fromkeys(swarm.machines, 0.0))
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, swarm.machines["p0"]) - DAY) < 0.2

    play(scene)


@SIZES
@pytest.mark.parametrize("by", [600.0, -600.0])
def test_one_of_many_that_starts_again_with_a_wrong_wall_clock_moves_nobody(num_peers: int, by: float) -> None:
    async def scene() -> None:
        swarm = await running(num_peers)
        await restart(swarm, {"p0": by})
        await goes_on(swarm)
        if num_peers > 1:
            assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in swarm.machines.values())

    play(scene)


@SIZES
@pytest.mark.parametrize(
    "set_forward",
    [(-HOUR, -HOUR, -HOUR, -HOUR), (-HOUR, 600.0, 0.0, -30.0)],
    ids=["an hour back, all", "each by another"],
)
def test_all_start_again_with_other_wall_clocks(num_peers: int, set_forward: tuple[float, ...]) -> None:
    async def scene() -> None:
        swarm = await running(num_peers)
        before = seconds(swarm.machines["p0"])
        await restart(swarm, {f"p{number}": set_forward[number] for number in range(num_peers)})
        await goes_on(swarm)
        assert seconds(swarm.machines["p0"]) > before

    play(scene)


@SIZES
@pytest.mark.parametrize("stands_still", ["none", "one", "all"])
def test_a_night_asleep(num_peers: int, stands_still: str) -> None:
    """The steady clocks of none, one or all machines stand still meanwhile."""

    async def scene() -> None:
        swarm = await running(num_peers)
        machines = list(swarm.machines.values())
        for machine in {"none": [], "one": machines[:1], "all": machines}[stands_still]:
            machine.clock_offset -= NIGHT
            machine.wall_step += NIGHT
        await swarm.sleep_for(NIGHT, loop_counts=stands_still == "none")
        await goes_on(swarm)

    play(scene)


@pytest.mark.parametrize("num_peers", [2, 3, 4])
def test_a_laptop_whose_steady_clock_stands_still_while_it_is_away_takes_the_others_time(num_peers: int) -> None:
    async def scene() -> None:
        swarm = await running(num_peers)
        laptop = swarm.machines["p1"]
        swarm.network.isolate(laptop.peer)
        await swarm.run(600.0)
        laptop.clock_offset -= 600.0
        laptop.wall_step += 600.0
        swarm.network.heal()
        await swarm.until(swarm.all_members, within=300.0)
        await swarm.run(64.0)
        assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in swarm.machines.values())
        await goes_on(swarm)

    play(scene)


def test_a_member_that_starts_first_and_alone_an_hour_behind_the_logs_of_the_others_moves_nobody() -> None:
    """Its disk is old and its wall clock is wrong: the others' logs say that its time cannot be."""

    async def scene() -> None:
        swarm = await running(3)
        swarm.save("p0")
        await swarm.kill("p0")
        await swarm.run(HOUR / 4)
        others = dict.fromkeys(("p1", "p2"), -HOUR)
        for name in others:
            swarm.save(name)
            await swarm.kill(name)
        swarm.machines["p0"].wall_step = -HOUR
        swarm.start("p0")
        await swarm.run(90.0)
        assert swarm_offset(swarm, swarm.machines["p0"]) < -600.0
        for name, by in others.items():
            swarm.machines[name].wall_step += by
            swarm.start(name)
        await swarm.until(swarm.all_members, within=300.0)
        await goes_on(swarm)

    play(scene)


def test_one_of_four_that_starts_again_beside_a_liar_moves_nobody() -> None:
    async def scene() -> None:
        swarm = await running(4)
        swarm.machines["p3"].clock_offset = DAY
        await swarm.run(20.0)
        await restart(swarm, {"p1": 5.0})
        honest = [swarm.machines[name] for name in ("p0", "p1", "p2")]
        for _ in range(60):
            await swarm.run(1.0)
            assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in (honest[0], honest[2]))
        assert abs(swarm_offset(swarm, honest[1])) < 0.3
        await swarm.grows("p0")
        await swarm.close()

    play(scene)


def test_a_member_whose_clock_jumps_only_listens_until_it_agrees_and_says_so() -> None:
    async def scene() -> None:
        swarm = await running(3)
        machine = swarm.machines["p1"]
        machine.clock_offset = 25.0  # both its clocks jump, so that it cannot know
        await swarm.run(20.0)
        (text,) = machine.texts("clock")
        assert text.startswith("the members' clocks and this peer's are ")
        assert "only listens" in text
        assert machine.engine.only_listens
        await swarm.run(60.0)
        assert machine.texts("clock")[1:] == ["the members' clocks and this peer's agree again"]
        assert not machine.engine.only_listens
        await goes_on(swarm)

    play(scene)


def test_members_that_nobody_can_dial_keep_together_through_the_bootstraps_clock() -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=9)
        bootstrap = swarm.add("bootstrap", trains=False, founds=True, clock_offset=600.0)
        for number in range(2):
            swarm.add(f"p{number}", dialable=False)
        await swarm.until(swarm.all_members, within=300.0)
        await swarm.grows("p0")
        await restart(swarm, {"p0": -300.0})
        await swarm.until(swarm.all_members, within=300.0)
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, bootstrap) - 600.0) < 0.3

    play(scene)
