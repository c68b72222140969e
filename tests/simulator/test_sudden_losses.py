"""Sudden losses of owners, of the only reducers, or of a certificate: for how many cycles a span gets no entry.

Spans are counted one by one: if only half of a fragment gets entries, that would hide the other half. A stall takes
three cycles, as in a manifest; if a majority is left, no peer waits for one. The limits are a cycle above the values of
these scenes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.protocol.wire.messages import Message, RosterReply
from simulator.coverage import longest_gap, share_of_spans
from simulator.hostility import telling
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

MOST_CYCLES = 6
WATCHED_ROUNDS = 20
"""Ten cycles."""


def told() -> Simulation:
    rules = run_rules(num_spans=(2, 2), stalled_cycles=3, heartbeat_seconds=2.0)
    return Simulation(seed=1, rules=rules, as_bytes=False)


async def begin(swarm: Simulation, num_open: int, num_hidden: int) -> None:
    """Let a bootstrap peer and these peers train until all count and all reachable ones reduce."""
    swarm.add("boot", trains=False, founds=True)
    for place in range(num_open + num_hidden):
        swarm.add(f"p{place}", place=OPEN if place < num_open else OUTBOUND_ONLY)
    await swarm.until(swarm.all_settled, within=300.0)


async def watch(swarm: Simulation, first: int) -> int:
    """Let ten cycles pass after a round, and return the longest gap; the last cycles must be whole."""
    await swarm.run_to_round(first + WATCHED_ROUNDS + 2)
    assert share_of_spans(swarm, first + WATCHED_ROUNDS - 6, first + WATCHED_ROUNDS) == 1.0, swarm.describe()
    await swarm.until(swarm.agreed, 2 * swarm.rules.cycle_seconds)
    return longest_gap(swarm, first, first + WATCHED_ROUNDS)


def owners(swarm: Simulation) -> list[str]:
    """Return the current owner of each span."""
    book = swarm.machines["p0"].running.book
    assert book.in_force_digest is not None
    _, grid = book.folded(book.in_force_digest, swarm.round)
    return [swarm.by_peer[grid.owner(span)].name for span in swarm.spans]


@pytest.mark.parametrize(
    ("num_open", "num_hidden", "most"), [(4, 2, 3), (4, 0, 5)], ids=["a majority is left", "half of the voters die"]
)
async def test_no_span_waits_long_when_owners_of_half_of_the_spans_die(
    num_open: int, num_hidden: int, most: int
) -> None:
    async with told() as swarm:
        await begin(swarm, num_open, num_hidden)
        owned = owners(swarm)
        dead: list[str] = []
        for name in sorted(set(owned)):
            if 2 * sum(owner in dead for owner in owned) < len(owned):
                dead.append(name)
        assert 2 * sum(owner in dead for owner in owned) >= len(owned)
        first = swarm.round
        for name in dead:
            swarm.kill(name)
        gap = await watch(swarm, first)
        assert gap <= most <= MOST_CYCLES


@pytest.mark.parametrize(
    ("num_open", "num_hidden", "most"),
    [(1, 2, 2), (2, 2, 5), (2, 3, 4)],
    ids=["one and two at home", "two and two at home", "two and three at home"],
)
async def test_the_bootstrap_serves_peers_at_home_when_all_reducers_die(
    num_open: int, num_hidden: int, most: int
) -> None:
    """No remaining peer can reach another; the bootstrap had left the roster while two others reduced."""
    async with told() as swarm:
        await begin(swarm, num_open, num_hidden)
        first = swarm.round
        for place in range(num_open):
            swarm.kill(f"p{place}")
        gap = await watch(swarm, first)
        assert gap <= most <= MOST_CYCLES


def lose_roster(swarm: Simulation, k: int) -> None:
    """Lose every message that carries roster `k`."""

    def pass_or_lose(message: Message) -> Message | None:
        is_lost = isinstance(message, RosterReply) and any(each.roster.k == k for each in message.rosters)
        return None if is_lost else message

    for machine in swarm.running(trains=False):
        assert machine.transport is not None
        machine.transport.mutator = telling(pass_or_lose)


@pytest.mark.parametrize(
    ("holder_dies", "most"), [(False, 3), (True, 4)], ids=["its holder lives", "its only holder dies"]
)
async def test_no_span_waits_long_when_most_members_miss_a_certificate(holder_dies: bool, most: int) -> None:
    """For two cycles only a ballot's leader gets the certificate; its voters name no parent under the old roster."""
    async with told() as swarm:
        await begin(swarm, 4, 0)
        k, first = swarm.machines["p0"].roster.k + 1, swarm.round
        lose_roster(swarm, k)
        engine = swarm.machines["p2"].running
        engine.set_conditions(replace(engine.conditions, share=2))

        def holders() -> list[str]:
            return [machine.name for machine in swarm.running() if machine.roster.k == k]

        await swarm.until(lambda: bool(holders()), 6 * swarm.rules.cycle_seconds, step=0.05)
        assert len(holders()) == 1
        if holder_dies:
            swarm.kill(holders()[0])
        await swarm.run(2 * swarm.rules.cycle_seconds)
        assert 2 * len(holders()) <= len(swarm.running()), "or nothing was lost"
        for machine in swarm.running(trains=False):
            assert machine.transport is not None
            machine.transport.mutator = None
        gap = await watch(swarm, first)
        assert gap <= most <= MOST_CYCLES
