"""Joining over a thin line, in virtual time: a line of 1.5 times the rate of entries is enough (I7), whoever dies."""

from __future__ import annotations

import pytest

from p2p_diloco.swarm import pieces
from tests.swarm import fake_island, memory_machine
from tests.swarm.memory_machine import Machine, run_rules
from tests.swarm.memory_stage import MemorySwarm, play

ELEMENTS = 4096
PIECE_BYTES = 2048
MARGIN = 1.5
OTHERS = ("ada", "ben", "cleo")


@pytest.fixture(autouse=True)
def large_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a span's state be some ten times as long as its entries, as in real runs, and travel in pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE_BYTES)
    for module in (fake_island, memory_machine):
        monkeypatch.setattr(module, "SPAN_ELEMENTS", ELEMENTS)
    optima = {span: fake_island.optimum(span) for span in fake_island.OPTIMA}
    for module in (fake_island, memory_machine):
        monkeypatch.setattr(module, "OPTIMA", optima)


def entry_bytes_per_second(swarm: MemorySwarm) -> float:
    """Return the rate of entries that a listener must follow, frames included."""
    entries = swarm.machines["ada"].disk.entries
    frame = max(len(entry.payload) for kept in entries.values() for entry in kept.values()) + 300
    return frame * swarm.rules.num_spans[0] / swarm.rules.clock.round_seconds


def state_bytes(swarm: MemorySwarm) -> int:
    return 8 * ELEMENTS * len(swarm.rules.span_elements)


async def going_swarm() -> MemorySwarm:
    swarm = MemorySwarm(seed=11, rules=run_rules())
    for name in OTHERS:
        swarm.add(name, founds=name == "ada")
    await swarm.until(swarm.all_members, 200.0)
    await swarm.grows("ada", entries=8)
    return swarm


def transferred(machine: Machine) -> int:
    return machine.running.traffic.received["transfer"]


async def join(swarm: MemorySwarm, factor: float) -> Machine:
    late = swarm.add("late")
    swarm.network.limit_line(late.peer, factor * entry_bytes_per_second(swarm))
    return late


def test_a_joiner_whose_line_exceeds_the_rate_of_entries_becomes_ready() -> None:
    async def scene() -> None:
        swarm = await going_swarm()
        late = await join(swarm, MARGIN)
        cycle = swarm.rules.clock.num_fragments * swarm.rules.clock.round_seconds
        seconds = await swarm.until(lambda: late.engine.ready, 40 * cycle)
        print(f"ready after {seconds / cycle:.1f} cycles, {transferred(late) / state_bytes(swarm):.2f} x state")
        assert transferred(late) < 1.3 * state_bytes(swarm)
        assert late.texts("donor") == [], "nobody was suspected for the thinness of the line"
        await swarm.finish()
        await swarm.close()

    play(scene)


def test_when_a_donor_dies_half_way_the_next_one_goes_on_where_it_ended() -> None:
    async def scene() -> None:
        swarm = await going_swarm()
        late = await join(swarm, 20.0)
        await swarm.until(lambda: transferred(late) > state_bytes(swarm) / 2, 100.0)
        assert not late.engine.ready
        await swarm.kill("ben")
        await swarm.until(lambda: late.engine.ready, 200.0)
        print(f"{transferred(late) / state_bytes(swarm):.2f} x state")
        assert transferred(late) < 1.3 * state_bytes(swarm)
        await swarm.finish()
        await swarm.close()

    play(scene)
