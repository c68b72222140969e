"""The real node in bad weather: twenty peers in four rows, a tenth of all messages lost, all from one seed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation, play

NUM_PEERS, NUM_LATE, GROUP_SIZE, NUM_ROWS = 20, 2, 4, 4


class Outcome(NamedTuple):
    """The result of a scene, without its loop."""

    names: tuple[str, ...]
    heights: frozenset[int]
    num_rows: int


async def come_and_go(seed: int) -> Outcome:
    """Run twenty peers: some join late, some leave, some die and return; then all agree."""
    rules = run_rules(
        num_spans=(12, 12), group_size=GROUP_SIZE, stalled_cycles=8, heartbeat_seconds=8.0, round_seconds=32.0
    )
    async with Simulation(seed=seed, rules=rules, as_bytes=False) as swarm:
        swarm.network.trouble.loss = 0.1
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(NUM_PEERS - NUM_LATE):
            place = OPEN if number % 4 > 0 else OUTBOUND_ONLY
            swarm.add(f"p{number}", place=place, step_seconds=0.8 + 0.02 * number, wall_offset=0.01 * number)
        await swarm.run_to_round(4)
        for number in range(NUM_PEERS - NUM_LATE, NUM_PEERS):
            swarm.add(f"p{number}", step_seconds=1.0)
        await swarm.run_to_round(14)
        await swarm.outlive("bootstrap", within=1200.0)
        begin = swarm.round
        await swarm.run_to_round(begin + 2)
        await swarm.depart("p3")
        await swarm.depart("p4")
        for name in ("p7", "p11", "p18"):
            swarm.kill(name)
        await swarm.run_to_round(begin + 5)
        for name in ("p3", "p7", "p11"):
            swarm.start(name)
        await swarm.run_to_round(begin + 13)
        await swarm.finish()
        machines = swarm.running()
        grid = machines[0].running.book.grid()
        assert grid is not None
        return Outcome(
            names=tuple(machine.name for machine in machines),
            heights=frozenset(machine.height() for machine in machines),
            num_rows=len(grid.rows),
        )


@pytest.mark.long
def test_twenty_peers_that_come_and_go_hold_the_same_bytes() -> None:
    outcome = play(lambda: come_and_go(2))
    assert len(outcome.names) == 18, "p4 left and p18 died; all others are alive, including those that returned"
    assert min(outcome.heights) > 250, "most rounds had entries for most spans"
    assert outcome.num_rows == NUM_ROWS
