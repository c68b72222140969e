"""Announced traffic compared with the bytes that simulated peers move, for few members, all or some of them reachable.

A bootstrap peer reduces while fewer than three members count or fewer than two others can reduce. To show the figures,
in MB per cycle, run `python -m pytest -s tests/swarm/test_announced_traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from p2p_diloco.bandwidth.uplink import UplinkWatch
from p2p_diloco.rate import WIRE_SHARE
from simulator.machine import Machine
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

FRAGMENTS = 2
RULES = run_rules(
    num_spans=(6,) * FRAGMENTS, stalled_cycles=8, heartbeat_seconds=8.0, round_seconds=16.0, span_elements=16384
)
"""Rules with vectors that outweigh their headers, as in real runs."""
SETTLING_ROUNDS = 20
"""Rounds until all count (four cycles) and all that can be dialled reduce (eight)."""
CYCLES = 3
HEADERS = 0.04
"""Largest share of the bytes that headers may take; the forecast leaves them out."""


def announced(machine: Machine, now: float) -> tuple[float, float]:
    """Return the bytes up and down per cycle in a peer's first notice."""
    assert machine.transport is not None
    notice, *_ = UplinkWatch(machine.limits, machine.transport.counters).notices(machine.running, now)
    return float(notice.figures["up_bytes"]), float(notice.figures["down_bytes"])


def moved(machine: Machine) -> tuple[int, int]:
    """Return the bytes of vectors that a peer has sent and received so far."""
    assert machine.node is not None
    traffic = machine.node.traffic
    return traffic.sent["vectors"], traffic.received["vectors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("islands", "reachable"),
    [(1, 1), (2, 2), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((3, 3), (2, 1), (4, 1)))],
)
async def test_a_peer_announces_what_it_moves_except_for_headers(islands: int, reachable: int) -> None:
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(islands):
            swarm.add(f"p{number}", place=OPEN if number < reachable else OUTBOUND_ONLY)
        await swarm.until(swarm.all_ready, within=400.0)
        await swarm.run_to_round(FRAGMENTS * (swarm.round // FRAGMENTS) + SETTLING_ROUNDS)
        trainers = swarm.running()
        before = [moved(machine) for machine in trainers]
        await swarm.run_to_round(swarm.round + FRAGMENTS * CYCLES)
        now = swarm.loop.true_seconds()
        after = [moved(machine) for machine in trainers]
        rows = [
            (*announced(machine, now), (sent - sent_before) / CYCLES, (received - received_before) / CYCLES)
            for machine, (sent, received), (sent_before, received_before) in zip(trainers, after, before, strict=True)
        ]
        for place, alike in (("reachable", rows[:reachable]), ("outbound only", rows[reachable:])):
            if alike:
                print_and_compare(f"{len(alike)} of {islands} trainers, {place}", alike)
        await swarm.finish()


def print_and_compare(who: str, rows: Sequence[tuple[float, ...]]) -> None:
    """Compare means, because owners take turns."""
    up, down, sent, received = (fmean(column) for column in zip(*rows, strict=True))
    sent, received = WIRE_SHARE * sent, WIRE_SHARE * received
    print(
        f"\n{who}: up {up / 1e6:.3f} said, {sent / 1e6:.3f} moved "
        f"({up / sent - 1:+.1%}); down {down / 1e6:.3f} said, {received / 1e6:.3f} moved ({down / received - 1:+.1%})"
    )
    assert (1 - HEADERS) * sent < up < sent
    assert (1 - HEADERS) * received < down < received
