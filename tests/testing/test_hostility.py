"""One hostile member among five, and a stranger: no honest process fails, and the honest go on together."""

from __future__ import annotations

import random

import pytest

from p2p_diloco.testing.endings import fragment_heights
from p2p_diloco.testing.hostility import MUTATORS, Stranger
from p2p_diloco.testing.simulation import Simulation, play

HONEST = ("p0", "p1", "p2", "p3")


async def settled(swarm: Simulation) -> None:
    for name in (*HONEST, "liar"):
        swarm.add(name, founds=name == "p0")
    await swarm.until(swarm.all_members, within=120.0)


@pytest.mark.parametrize("lie", MUTATORS)
def test_one_lying_member_neither_ends_an_honest_process_nor_parts_the_honest(lie: str) -> None:
    async def scene() -> None:
        async with Simulation(seed=1) as swarm:
            await settled(swarm)
            liar = swarm.machines["liar"]
            liar.lie(MUTATORS[lie](liar, random.Random(1)))
            await swarm.run(160.0)
            swarm.kill("liar")
            await swarm.run(80.0)
            heights = fragment_heights(swarm)
            await swarm.run(80.0)
            assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))
            await swarm.until(lambda: swarm.agreed(HONEST), within=40.0)

    play(scene)


def test_a_stranger_neither_ends_a_process_nor_stops_the_run() -> None:
    async def scene() -> None:
        async with Simulation(seed=2) as swarm:
            await settled(swarm)
            stranger = Stranger(swarm, 3)
            stranger.begin()
            await swarm.run(80.0)
            assert len(stranger.linked_peers()) == len(swarm.machines)
            stranger.end()
            await swarm.run(20.0)
            heights = fragment_heights(swarm)
            await swarm.run(60.0)
            assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))

    play(scene)
