"""The real shell where vectors are lost or late, and openings are there: no round is void for it, all hold the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.messages import SpanVector, decode_message
from p2p_diloco.transport.link import Lane
from tests.swarm.memory_machine import Machine, run_rules
from tests.swarm.memory_stage import MemorySwarm, play

NUM_SPANS = 8
NUM_ROUNDS = 8
LATE_SECONDS = 11.0
"""Behind the moment at which reducers stop waiting, within the round."""


async def founded(num_peers: int, seed: int = 0) -> MemorySwarm:
    swarm = MemorySwarm(seed=seed, rules=run_rules(spans=NUM_SPANS))
    swarm.add("bootstrap", trains=False, founds=True)
    for number in range(num_peers):
        swarm.add(f"p{number}", step_seconds=0.9 + 0.1 * number)
    await swarm.until(swarm.all_members, within=180.0)
    await swarm.kill("bootstrap")
    await swarm.run_to_round(swarm.round + 2)
    return swarm


def tamper(machine: Machine, with_vector: Callable[[Callable[[], bool]], bool]) -> Callable[[], None]:
    """Let `with_vector` decide, behind a machine's back, what becomes of each vector that it posts to contribute.

    Returns:
        How to end it.
    """
    transport = machine.transport
    assert transport is not None
    post = transport.post

    def tampered(peer: PeerId, frame: bytes, *, lane: Lane, deadline: float) -> bool:
        if lane is not Lane.BULK or not isinstance(decode_message(frame), SpanVector):
            return post(peer, frame, lane=lane, deadline=deadline)
        return with_vector(partial(post, peer, frame, lane=lane, deadline=deadline + 2 * LATE_SECONDS))

    def mend() -> None:
        transport.post = post  # type: ignore[method-assign]

    transport.post = tampered  # type: ignore[method-assign]
    return mend


def lose_vectors(machine: Machine, chance: random.Random, share: float) -> Callable[[], None]:
    return tamper(machine, lambda send: chance.random() < share or send())


def delay_vectors(machine: Machine) -> Callable[[], None]:
    def later(send: Callable[[], bool]) -> bool:
        asyncio.get_running_loop().call_later(LATE_SECONDS, send)
        return True

    return tamper(machine, later)


async def play_rounds(swarm: MemorySwarm) -> tuple[list[int], int]:
    """Return how many spans moved in each of some rounds, and how many contributions were included in all of them."""
    await swarm.run_to_round(swarm.round + 1)
    begin = swarm.round
    await swarm.run_to_round(begin + NUM_ROUNDS)
    await swarm.run(0.1)
    closed = [closed for closed in swarm.machines["p0"].closed if closed.round >= begin]
    return [one.num_entries for one in closed], sum(one.num_included for one in closed)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_lost_vectors_make_no_round_void_and_all_hold_the_same_bytes(num_peers: int, share: float) -> None:
    async def scene() -> None:
        swarm = await founded(num_peers)
        chance = random.Random(num_peers)
        mends = [lose_vectors(machine, chance, share) for machine in swarm.living()]
        moved, included = await play_rounds(swarm)
        assert moved == [NUM_SPANS] * NUM_ROUNDS
        if share == 1.0:
            assert included == NUM_SPANS * NUM_ROUNDS, "of every span its reducer's own contribution alone"
        assert swarm.all_members(), "nobody is taken off a roster for vectors that were lost"
        for mend in mends:
            mend()
        await swarm.finish()
        await swarm.close()

    play(scene)


@pytest.mark.parametrize("num_peers", [2, 3, 4])
def test_who_sends_too_slowly_is_there_and_holds_nobody_beyond_the_deadline(num_peers: int) -> None:
    async def scene() -> None:
        swarm = await founded(num_peers)
        slow = swarm.machines[f"p{num_peers - 1}"]
        mend = delay_vectors(slow)
        moved, included = await play_rounds(swarm)
        assert moved == [NUM_SPANS] * NUM_ROUNDS
        own = NUM_SPANS // num_peers + 1
        assert included <= NUM_ROUNDS * (NUM_SPANS * (num_peers - 1) + own), (
            "in the mean of what it reduces itself only"
        )
        assert swarm.all_members()
        mend()
        await swarm.finish()
        await swarm.close()

    play(scene)
