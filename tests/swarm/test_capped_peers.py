"""Peers with a cap, in virtual time: they contribute the spans that fit, follow every entry, and delay nobody."""

from __future__ import annotations

import pytest

from p2p_diloco.protocol.round.traffic import Encoded, Flow, exchange_flow, upload_needed
from p2p_diloco.rate import WIRE_SHARE
from p2p_diloco.transport.link import TransportLimits
from simulator.machine import Machine
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

ELEMENTS = 16384
"""Elements per span: vectors outweigh heartbeats, as in real runs."""
SPANS = 8
STEP_SECONDS = 1.5
OTHERS = ("ada", "ben", "cleo")
ROUNDS = 4
RULES = run_rules(
    num_spans=(SPANS, SPANS), stalled_cycles=8, heartbeat_seconds=8.0, round_seconds=16.0, span_elements=ELEMENTS
)


def flow_of(swarm: Simulation, *, is_reachable: bool) -> Flow:
    rules = swarm.rules
    sizes = (rules.payload_bytes, rules.row_mean_bytes, rules.entry_bytes)
    whole = [float(sum(size for span, size in each.items() if span.fragment == 0)) for each in sizes]
    encoded = Encoded(contribution=whole[0], row_mean=whole[1], entry=whole[2])
    return exchange_flow(encoded, members=4, group_size=32, reachable=3 + is_reachable, is_reachable=is_reachable)


def included(machine: Machine, since: int) -> float:
    """Return the mean number of contributions in an entry, over the spans of all rounds since."""
    closed = [closed for closed in machine.closed if closed.round >= since]
    return sum(one.num_included for one in closed) / sum(one.num_spans for one in closed)


async def begin(swarm: Simulation, *, share: float, dialable: bool) -> tuple[Machine, int]:
    """Let three peers and one with this share of the needed upload train; return that one and the first whole round."""
    for name in OTHERS:
        swarm.add(name, founds=name == "ada", step_seconds=STEP_SECONDS)
    cap = share * upload_needed(flow_of(swarm, is_reachable=dialable), swarm.rules.clock.round_seconds)
    limits = TransportLimits(upload_bytes_per_second=cap)
    place = OPEN if dialable else OUTBOUND_ONLY
    late = swarm.add("late", place=place, limits=limits, step_seconds=STEP_SECONDS)
    await swarm.until(swarm.all_ready, 400.0)
    first = swarm.round + 3  # after a cycle as a newcomer, whose contributions are included as well
    await swarm.run_to_round(first + ROUNDS)
    await swarm.run(0.5)
    return late, first


@pytest.mark.slow
async def test_a_peer_that_only_contributes_sends_the_share_that_its_cap_allows_and_no_span_is_skipped() -> None:
    async with Simulation(seed=5, rules=RULES, as_bytes=False) as swarm:
        late, first = await begin(swarm, share=0.25, dialable=False)
        assert included(swarm.machines["ada"], first) == pytest.approx(3.25, abs=0.13)
        assert len({machine.height() for machine in swarm.running()}) == 1, "it follows all entries"
        assert late.transport is not None
        cap = late.limits.upload_bytes_per_second
        assert cap is not None
        before, began = late.transport.counters.bulk.bytes_sent, swarm.now
        await swarm.run_to_round(swarm.round + 4)
        rate = (late.transport.counters.bulk.bytes_sent - before) / (swarm.now - began)
        assert 0.2 * cap < WIRE_SHARE * rate < cap
        # In some rounds reducers wait for it until they stop waiting; no span is skipped for that.
        height = swarm.machines["ada"].height()
        await swarm.run(0.8 * swarm.rules.clock.round_seconds)
        assert swarm.machines["ada"].height() - height == SPANS
        await swarm.finish()


@pytest.mark.slow
async def test_a_reducing_peer_sends_its_entries_before_it_contributes() -> None:
    async with Simulation(seed=5, rules=RULES, as_bytes=False) as swarm:
        _, first = await begin(swarm, share=0.75, dialable=True)
        ada = swarm.machines["ada"]
        closed = [closed for closed in ada.closed if closed.round >= first]
        assert all(one.num_entries == SPANS for one in closed), "no span is skipped because of the cap"
        # Reducing takes half of the need and headers take their part, so less than half of a contribution is left
        # to
        # send; a quarter of the spans it reduces itself.
        assert 3.25 < included(ada, first) < 3.65
        await swarm.finish()
