"""Joining over a thin line, in virtual time: 1.5 times the rate of entries is enough (I7), even if a donor dies."""

from __future__ import annotations

import pytest

from p2p_diloco.span import serve
from simulator.machine import Machine
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

ELEMENTS = 4096
"""Elements per span: its state is about ten times as long as its entries, as in real runs, and is sent in pieces."""
PIECE_BYTES = 2048
MARGIN = 1.5
OTHERS = ("ada", "ben", "cleo")
RULES = run_rules(num_spans=(4, 4), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0, span_elements=ELEMENTS)
STATE_BYTES = 8 * ELEMENTS * len(RULES.span_elements)
ENTRY_BYTES_PER_SECOND = (max(RULES.entry_bytes.values()) + 300) * RULES.num_spans[0] / RULES.clock.round_seconds
"""The rate that a listener must follow, with frames."""


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PIECE_BYTES", PIECE_BYTES)


async def join(swarm: Simulation, factor: float) -> Machine:
    """Let three peers train, and a fourth join over a line of `factor` times the rate of entries."""
    for name in OTHERS:
        swarm.add(name, founds=name == "ada")
    await swarm.until(swarm.all_ready, 200.0)
    await swarm.grows("ada", entries=8)
    late = swarm.add("late")
    swarm.network.limit_line(late.peer, factor * ENTRY_BYTES_PER_SECOND)
    return late


def transferred(machine: Machine) -> int:
    assert machine.node is not None
    return machine.node.traffic.received["transfer"]


@pytest.mark.slow
async def test_a_joiner_whose_line_exceeds_the_rate_of_entries_becomes_ready() -> None:
    async with Simulation(seed=11, rules=RULES, as_bytes=False) as swarm:
        late = await join(swarm, MARGIN)
        cycle = swarm.rules.clock.num_fragments * swarm.rules.clock.round_seconds
        await swarm.until(lambda: late.running.ready, 40 * cycle)
        assert transferred(late) < 1.3 * STATE_BYTES
        assert late.texts("donor") == [], "no donor was blamed for the thin line"
        await swarm.finish()


async def test_after_a_donor_died_half_way_the_next_one_continues_there() -> None:
    async with Simulation(seed=11, rules=RULES, as_bytes=False) as swarm:
        late = await join(swarm, 20.0)
        await swarm.until(lambda: transferred(late) > STATE_BYTES / 2, 100.0)
        assert not late.running.ready
        swarm.kill("ben")
        await swarm.until(lambda: late.running.ready, 200.0)
        assert transferred(late) < 1.3 * STATE_BYTES
        await swarm.finish()
