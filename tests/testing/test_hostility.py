"""One hostile member among five, and a stranger: no honest process fails, and the honest go on together."""

from __future__ import annotations

import random

import pytest

from p2p_diloco.testing.endings import fragment_heights
from p2p_diloco.testing.hostility import MUTATORS, MutatorMaker, Stranger, claims_reach
from p2p_diloco.testing.network import OUTBOUND_ONLY
from p2p_diloco.testing.run import key_named
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


IDENTITIES = tuple(f"identity{number}" for number in range(8))
FIRST, SECOND = (key_named(name).peer for name in IDENTITIES[:2])


def share_of_spans(swarm: Simulation, first: int, until: int) -> float:
    """Return how much of the spans of some rounds got entries."""
    clock = swarm.rules.clock
    due = sum(swarm.rules.num_spans[clock.fragment(index)] for index in range(first, until))
    return sum(first <= entry.round < until for entry in swarm.inspector.entries.values()) / due


async def share_while_eight_claim(
    swarm: Simulation, lie: MutatorMaker, *, are_vouched_for: bool = False
) -> tuple[float, float]:
    """Return how much of the spans got entries while eight identities attack two volunteers at home, and after.

    They come together, and each stays; the roster lists two in a cycle.
    """
    swarm.add("boot", trains=False, founds=True)
    for name in ("p0", "p1"):
        swarm.add(name, place=name)
    await swarm.until(swarm.all_members, within=120.0)
    await swarm.run_to_round(swarm.round + 3)
    first = swarm.round
    for name in IDENTITIES:
        identity = swarm.add(name, place=OUTBOUND_ONLY, believes_open=True, start=False)
        identity.is_vouched_for = are_vouched_for
        identity.lie(lie(identity, random.Random(name)))
        swarm.start(name)
    await swarm.run_to_round(first + 24)
    for name in IDENTITIES:
        swarm.kill(name)
    await swarm.run_to_round(first + 32)
    during = share_of_spans(swarm, first, first + 22)
    return during, share_of_spans(swarm, first + 24, first + 30)


@pytest.mark.parametrize(
    "lie",
    [
        claims_reach(key_named("boot").peer, is_forged=True),
        claims_reach(FIRST, SECOND),
        claims_reach(key_named("p0").peer, is_forged=True),
    ],
    ids=["forged proofs of the bootstrap", "proofs of their own", "forged proofs of a member"],
)
def test_eight_identities_that_claim_to_be_reachable_and_open_empty_handed_stop_no_span(lie: MutatorMaker) -> None:
    """Two honest volunteers behind routers, and a bootstrap that averages for them."""

    async def scene() -> None:
        async with Simulation(seed=3) as swarm:
            during, after = await share_while_eight_claim(swarm, lie)
            assert during >= 0.9
            assert after >= 0.9
            rosters = swarm.inspector.rosters.values()
            reduced = {member.peer for roster in rosters for member in roster.members if member.reduces}
            assert reduced == {swarm.machines["boot"].peer}

    play(scene)


def test_what_eight_claims_cost_where_they_are_believed() -> None:
    """The measure of the scene above: with proofs that count, the same identities own spans and withhold entries."""

    async def scene() -> None:
        async with Simulation(seed=3) as swarm:
            during, _ = await share_while_eight_claim(swarm, claims_reach(), are_vouched_for=True)
            assert during < 0.7

    play(scene)
