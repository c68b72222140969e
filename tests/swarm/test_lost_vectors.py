"""The real node with lost or late vectors but all openings: no span is skipped, and all hold the same bytes."""

from __future__ import annotations

import random

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire.messages import Message, SpanVector, encode_message
from p2p_diloco.transport.link import Lane
from simulator.hostility import telling
from simulator.machine import Machine
from simulator.network import Mutator
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

NUM_SPANS = 8
NUM_ROUNDS = 8
LATE_SECONDS = 11.0
"""A delay after which reducers no longer wait, but within the round."""
RULES = run_rules(num_spans=(NUM_SPANS, NUM_SPANS), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0)


async def found(swarm: Simulation, num_peers: int) -> None:
    swarm.add("bootstrap", trains=False, founds=True)
    for number in range(num_peers):
        swarm.add(f"p{number}", step_seconds=0.9 + 0.1 * number)
    await swarm.until(swarm.all_settled, within=600.0)
    await swarm.outlive("bootstrap")
    await swarm.run_to_round(swarm.round + 2)


def lose_vectors(chance: random.Random, share: float) -> Mutator:
    return telling(lambda message: None if isinstance(message, SpanVector) and chance.random() < share else message)


def delay_vectors(swarm: Simulation, machine: Machine) -> Mutator:
    """Delay a machine's vectors, bypassing its node."""

    def send(to: PeerId, frame: bytes) -> None:
        transport = machine.transport
        if transport is not None:
            transport.post_unchanged(to, frame, lane=Lane.BULK, deadline=swarm.loop.true_seconds() + LATE_SECONDS)

    def mutate(to: PeerId, message: Message) -> list[Message]:
        if not isinstance(message, SpanVector):
            return [message]
        swarm.at(swarm.now + LATE_SECONDS, send, to, encode_message(message))
        return []

    return mutate


async def play_rounds(swarm: Simulation) -> tuple[list[int], int]:
    """Return the number of spans with entries in each of some rounds, and the total of included contributions."""
    await swarm.run_to_round(swarm.round + 1)
    begin = swarm.round
    await swarm.run_to_round(begin + NUM_ROUNDS)
    await swarm.run(0.1)
    closed = [closed for closed in swarm.machines["p0"].closed if closed.round >= begin]
    return [one.num_entries for one in closed], sum(one.num_included for one in closed)


async def is_mended(swarm: Simulation, machines: list[Machine]) -> None:
    assert swarm.all_ready(), "no member is dropped for lost or late vectors"
    for machine in machines:
        machine.lie(None)
    await swarm.until(swarm.agreed, within=64.0)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.25, 1.0])
async def test_lost_vectors_skip_no_span_and_all_hold_the_same_bytes(num_peers: int, share: float) -> None:
    async with Simulation(rules=RULES, as_bytes=False) as swarm:
        await found(swarm, num_peers)
        chance = random.Random(num_peers)
        for machine in swarm.running():
            machine.lie(lose_vectors(chance, share))
        moved, included = await play_rounds(swarm)
        assert moved == [NUM_SPANS] * NUM_ROUNDS
        if share == 1.0:
            assert included == NUM_SPANS * NUM_ROUNDS, "for every span only its reducer's own contribution"
        await is_mended(swarm, swarm.running())


@pytest.mark.parametrize("num_peers", [2, 3, 4])
async def test_a_peer_that_sends_too_slowly_counts_as_present_and_delays_nobody_beyond_the_deadline(
    num_peers: int,
) -> None:
    async with Simulation(rules=RULES, as_bytes=False) as swarm:
        await found(swarm, num_peers)
        slow = swarm.machines[f"p{num_peers - 1}"]
        slow.lie(delay_vectors(swarm, slow))
        moved, included = await play_rounds(swarm)
        assert moved == [NUM_SPANS] * NUM_ROUNDS
        own = NUM_SPANS // num_peers + 1
        assert included <= NUM_ROUNDS * (NUM_SPANS * (num_peers - 1) + own), "only in the means that it reduces itself"
        await is_mended(swarm, [slow])
