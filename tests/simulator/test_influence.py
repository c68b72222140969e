"""Honest members name a liar that outweighs them or signs false means, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import pytest

from p2p_diloco.codec.codec import Codec, Encoded, codec_named
from p2p_diloco.codec.vectors import Bytes, Vector
from p2p_diloco.ids import short_peer_id
from p2p_diloco.protocol.round.round import FragmentContribution
from simulator.machine import Machine
from simulator.run import codecs_of, run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

HONEST = ("p0", "p1", "p2", "p3")
RULES = run_rules(num_spans=(8, 8), span_elements=256, heartbeat_seconds=2.0)
CYCLE_SECONDS = RULES.cycle_seconds
HEAVY, CLIPPED, AGAINST = "of the weight", "times as long as may be sent", "point against"
CLAIMED_TOKENS = 10**12


def claims_and_flips(machine: Machine) -> None:
    """Contribute the opposite of what was learnt, and claim to have trained on 10^12 tokens."""
    codec = codec_named("int4")

    def lie(contribution: FragmentContribution) -> FragmentContribution:
        spans = tuple(
            replace(each, payload=codec.encode(-codec.decode(each.payload, RULES.span_elements[each.span])))
            for each in contribution.spans
        )
        return replace(contribution, tokens=CLAIMED_TOKENS, spans=spans)

    machine.vectors.mischief = lie


def claims_norms(machine: Machine) -> None:
    """Claim that contributions were clipped to a hundredth."""
    machine.vectors.mischief = lambda contribution: replace(
        contribution, spans=tuple(replace(each, norm=100.0 * each.norm) for each in contribution.spans)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opposite(Codec):
    """Encodes minus the vector."""

    name: str = "opposite"
    codec: Codec = field(default_factory=lambda: codec_named("int4"))

    def encoded_bytes(self, elements: int) -> int:
        return self.codec.encoded_bytes(elements)

    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        return self.codec.encode(-vector_N, rounding_seed=rounding_seed)

    def decode(self, encoded: Encoded, elements: int) -> Vector:
        return self.codec.decode(encoded, elements)

    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        return self.codec.bytes_of(received, elements, here)

    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        return self.codec.squared_norm(encoded, elements)


def signs_the_opposite(machine: Machine) -> None:
    """Sign minus the mean as an owner."""
    node: Any = machine.node
    node.vectors.codecs = replace(node.vectors.codecs, entry=Opposite())


def named(swarm: Simulation, word: str) -> dict[str, set[str]]:
    """Return whom each peer has named, by machine name."""
    names = {short_peer_id(machine.peer): name for name, machine in swarm.machines.items()}
    return {
        machine.name: {names[text.split()[0]] for text in machine.texts("influence") if word in text}
        for machine in swarm.machines.values()
    }


def all_reduce(swarm: Simulation) -> bool:
    return all(member.reduces for machine in swarm.running() for member in machine.roster.members)


async def with_liar(lie: Callable[[Machine], None], cycles: int, seed: int) -> Simulation:
    """Return a swarm of four honest peers in which a fifth has lied for a number of cycles."""
    async with Simulation(seed=seed, codecs=codecs_of("int4"), rules=RULES) as swarm:
        for name in (*HONEST, "liar"):
            swarm.add(name, founds=name == "p0")
        await swarm.until(lambda: swarm.all_members() and all_reduce(swarm), within=240.0)
        await swarm.run_to_round(swarm.round + 2 * RULES.clock.num_fragments)
        assert [text for machine in swarm.running() for text in machine.texts("influence")] == []
        liar = swarm.machines["liar"]
        liar.is_liar = True
        lie(liar)
        await swarm.run((cycles + 0.25) * CYCLE_SECONDS)
        return swarm


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("lie", "word", "cycles"),
    [(claims_and_flips, HEAVY, 2), (signs_the_opposite, AGAINST, 4), (claims_norms, CLIPPED, 9)],
)
async def test_a_liar_is_named_by_most_honest_members_and_nobody_else_is(
    lie: Callable[[Machine], None], word: str, cycles: int, seed: int
) -> None:
    swarm = await with_liar(lie, cycles, seed)
    names = named(swarm, word)
    assert sum("liar" in names[name] for name in HONEST) >= len(HONEST) / 2, names
    for honest in HONEST:
        said = set().union(*(named(swarm, any_word)[honest] for any_word in (HEAVY, CLIPPED, AGAINST)))
        assert said <= {"liar"}, said


# `pytest -m long` plays all of them.
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed > 1 else []) for seed in range(100)]
)
async def test_in_honest_runs_of_islands_of_unequal_speed_only_fast_ones_are_named_and_only_for_their_weight(
    seed: int,
) -> None:
    rng = random.Random(seed)
    peers = {f"p{place}": rng.uniform(0.05, 1.5) for place in range(rng.randint(2, 8))}
    async with Simulation(seed=seed, codecs=codecs_of("int4"), rules=RULES) as swarm:
        for name, seconds in peers.items():
            swarm.add(name, founds=name == "p0", step_seconds=seconds)
        await swarm.until(swarm.all_members, within=120.0)
        await swarm.run(30 * CYCLE_SECONDS)
        heavy = set().union(*named(swarm, HEAVY).values())
        print(f"seed {seed}: {len(peers)} islands, steps of {peers}; named for their weight: {sorted(heavy)}")
        assert all(peers[name] < median(peers.values()) for name in heavy)
        for word in (CLIPPED, AGAINST):
            assert not set().union(*named(swarm, word).values()), word
