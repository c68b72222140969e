"""State folders that were copied, or restored from a backup older than what their peer has signed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.coverage import share_of_spans
from simulator.machine import Machine
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

OTHERS = ("p0", "p1", "p2", "p3")
RULES = run_rules(num_spans=(2, 2), heartbeat_seconds=2.0)


async def begin(swarm: Simulation, place: str) -> Machine:
    """Let five peers train until all count; return the one that is copied or restored."""
    for name in OTHERS:
        swarm.add(name, founds=name == "p0")
    swarm.add("p4", place=place)
    await swarm.until(swarm.all_settled, within=300.0)
    return swarm.machines["p4"]


@pytest.mark.parametrize(
    ("place", "seconds"),
    [(OPEN, 30.0), (OPEN, 0.0), (OUTBOUND_ONLY, 30.0)],
    ids=["reachable", "reachable and started at once", "at home"],
)
async def test_two_machines_with_one_identity_harm_no_others_and_both_report_it(place: str, seconds: float) -> None:
    """They take over each other's links. Started in one second, they are one incarnation and sign different entries."""
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        original = await begin(swarm, place)
        swarm.kill("p4")
        copy = swarm.add("copy", place=place, copied_from="p4", start=False)
        swarm.start("p4")
        await swarm.run(seconds)
        swarm.start("copy")
        original.topics.clear()
        first = swarm.round
        await swarm.run_to_round(first + 18)
        for machine in (original, copy):
            assert "identity" in machine.topics, (machine, machine.reports)
            for text in machine.texts("identity"):
                assert "stop one of them, and give it its own state directory" in text
        assert share_of_spans(swarm, first, first + 16) >= 0.9
        swarm.kill("copy")
        await swarm.run_to_round(swarm.round + 4)
        await swarm.until(swarm.agreed, within=4 * swarm.rules.cycle_seconds)


@pytest.mark.slow
async def test_a_state_folder_restored_from_a_backup_harms_no_peer_and_is_reported() -> None:
    """Since the backup, its peer has voted for rosters that it no longer knows."""
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        restored = await begin(swarm, OPEN)
        backup, k = swarm.snapshot("p4"), restored.roster.k
        for share in (4, 8, 4):
            engine = swarm.machines["p2"].running
            engine.set_conditions(replace(engine.conditions, share=share))
            await swarm.run(3 * swarm.rules.cycle_seconds)
        assert restored.roster.k == k + 3
        swarm.kill("p4")
        await swarm.run(1.0)
        swarm.restore("p4", backup)
        swarm.inspector.restored.add(restored.peer)
        restored.reports.clear()
        first = swarm.round + 1
        swarm.start("p4")
        await swarm.until(swarm.all_ready, within=4 * swarm.rules.cycle_seconds)
        (text,) = restored.texts("identity")
        assert text.startswith("roster ")
        assert "carries a vote of this peer that its state directory does not hold" in text
        assert "restored from a backup (nothing to do)" in text
        await swarm.run_to_round(first + 12)
        assert share_of_spans(swarm, first, first + 10) >= 0.9
        await swarm.until(swarm.agreed, within=2 * swarm.rules.cycle_seconds)


async def test_the_only_voter_restored_from_a_backup_after_its_clock_was_ahead_continues_the_run() -> None:
    """Starts on such a disk are numbered by the clock, so the roster listed a later one. No more entries were made."""
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        founder = swarm.add("p0", founds=True)
        swarm.add("p1")
        await swarm.until(swarm.all_ready, within=60.0)
        swarm.kill("p0")
        backup = swarm.snapshot("p0")
        founder.clock.set_wall(swarm.loop.true_seconds(), 600.0)
        await swarm.run(0.5)
        swarm.start("p0")
        later = founder.running.me.incarnation
        await swarm.until(swarm.all_ready, within=60.0)
        assert founder.roster.voters == {founder.peer}
        swarm.kill("p0")
        swarm.restore("p0", backup)
        swarm.inspector.restored.add(founder.peer)
        founder.clock.set_wall(swarm.loop.true_seconds(), 0.0)
        await swarm.run(0.5)
        swarm.start("p0")
        assert founder.running.me.incarnation < later
        first = swarm.round
        await swarm.until(swarm.all_ready, within=8 * RULES.cycle_seconds)
        assert founder.running.membership.local.me.incarnation == later + 1
        assert f"lists start {later} of this peer" in founder.texts("identity")[-1]
        first = swarm.round + 1
        await swarm.run_to_round(first + 4)
        assert share_of_spans(swarm, first, first + 3) == 1.0
