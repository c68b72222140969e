"""One, two and three peers, reachable or not: founding, joining, leaving, deaths, a weekend asleep and waking."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

WEEKEND_SECONDS = 60 * 3600.0
CASES = [(count, who) for count in (1, 2, 3) for who in ("all", "one", "none")]
COMPANY = [(count, who) for count, who in CASES if count > 1]
RULES = run_rules(num_spans=(4, 4), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0)

everywhere = pytest.mark.parametrize(("count", "who"), CASES)
in_company = pytest.mark.parametrize(("count", "who"), COMPANY)


@asynccontextmanager
async def grown_swarm(count: int, who: str) -> AsyncIterator[Simulation]:
    """Let `count` peers join one by one, only the first open if `who` is "one"; at the end check that all train."""
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        swarm.network.trouble.loss = 0.02
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(count):
            is_open = who == "all" or (who == "one" and number == 0)
            place = OPEN if is_open else OUTBOUND_ONLY
            swarm.add(f"p{number}", place=place, step_seconds=0.7 + 0.2 * number, wall_offset=0.02 * number)
            await swarm.until(swarm.all_ready, within=180.0)
        yield swarm
        await swarm.until(swarm.all_ready, within=600.0)
        for machine in swarm.running():
            await swarm.grows(machine.name)
        await swarm.until(swarm.agreed, within=128.0)


@everywhere
async def test_a_run_is_founded_and_joined_one_by_one(count: int, who: str) -> None:
    async with grown_swarm(count, who) as swarm:
        if who != "none":
            swarm.kill("bootstrap")
        await swarm.grows("p0", entries=64, within=600.0)


@in_company
async def test_a_member_leaves_and_returns(count: int, who: str) -> None:
    async with grown_swarm(count, who) as swarm:
        leaver = f"p{count - 1}"
        await swarm.depart(leaver)
        await swarm.until(swarm.all_ready, within=90.0)
        await swarm.grows("p0")
        swarm.start(leaver)


@in_company
async def test_a_member_dies_and_returns_without_its_files(count: int, who: str) -> None:
    async with grown_swarm(count, who) as swarm:
        late = f"p{count - 1}"
        swarm.wipe(late)
        # One of two is no majority: the other waits for eight cycles without entries.
        await swarm.until(swarm.all_ready, within=90.0 if count > 2 else 450.0)
        await swarm.grows("p0")
        swarm.start(late)


@everywhere
@pytest.mark.parametrize("stands_still", [True, False], ids=["clock-stood-still", "clock-went-on"])
@pytest.mark.parametrize(
    "finds_links", [pytest.param(True, marks=pytest.mark.long), False], ids=["linked", "links-broken"]
)
async def test_training_continues_after_all_slept_for_a_weekend(
    count: int, who: str, stands_still: bool, finds_links: bool
) -> None:
    async with grown_swarm(count, who) as swarm:
        await swarm.grows("p0")
        for name in swarm.machines:
            swarm.stop(name, sleeps=stands_still)
        await swarm.run(WEEKEND_SECONDS)
        for name in swarm.machines:
            swarm.go_on(name)
        for name in swarm.machines if not finds_links else ():
            swarm.break_links(name)
        await swarm.until(swarm.all_ready, within=600.0)
        assert all(machine.running.book.num_degraded() == 0 for machine in swarm.running()), (
            "no peer continued without the others"
        )


@everywhere
@pytest.mark.parametrize("polite", [False, True], ids=["killed", "left"])
async def test_training_continues_after_all_stopped_and_returned(count: int, who: str, polite: bool) -> None:
    async with grown_swarm(count, who) as swarm:
        await swarm.grows("p0")
        names = [machine.name for machine in swarm.running()]
        for name in names:
            if polite:
                await swarm.depart(name)
            else:
                swarm.kill(name)
        await swarm.run(60.0)
        for name in reversed(names):
            swarm.start(name)
            await swarm.run(5.0)
