"""One, two and three peers, whoever can be dialled: founded, joined, left, bereaved, asleep for a weekend and awake."""

from __future__ import annotations

import pytest

from tests.swarm.memory_machine import distance_to_optimum
from tests.swarm.memory_stage import MemorySwarm, play

WEEKEND_SECONDS = 60 * 3600.0
CASES = [(count, who) for count in (1, 2, 3) for who in ("all", "one", "none")]
COMPANY = [(count, who) for count, who in CASES if count > 1]

everywhere = pytest.mark.parametrize(("count", "who"), CASES)
in_company = pytest.mark.parametrize(("count", "who"), COMPANY)


async def grown(count: int, who: str, *, seed: int = 1) -> MemorySwarm:
    """Found a run and let `count` peers join one by one, the first of them dialable when `who` is "one"."""
    swarm = MemorySwarm(seed=seed, loss=0.02)
    swarm.add("bootstrap", trains=False, founds=True)
    for number in range(count):
        dialable = who == "all" or (who == "one" and number == 0)
        swarm.add(f"p{number}", dialable=dialable, step_seconds=0.7 + 0.2 * number, clock_offset=0.02 * number)
        await swarm.until(swarm.all_members, within=180.0)
    return swarm


async def ends_well(swarm: MemorySwarm) -> None:
    """See training go on, stop at one boundary, and compare bytes."""
    await swarm.until(swarm.all_members, within=600.0)
    for machine in swarm.living():
        await swarm.grows(machine.name)
    await swarm.finish()
    assert all(distance_to_optimum(machine) < 1.0 for machine in swarm.living())
    await swarm.close()


@everywhere
def test_a_run_is_founded_and_joined_one_by_one(count: int, who: str) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        if who != "none":
            await swarm.kill("bootstrap")
        await swarm.grows("p0", entries=64, within=600.0)
        assert distance_to_optimum(swarm.machines["p0"]) < 0.2
        await ends_well(swarm)

    play(scene)


@in_company
def test_a_member_says_good_bye_and_comes_again(count: int, who: str) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        leaver = f"p{count - 1}"
        await swarm.leave(leaver)
        await swarm.until(swarm.all_members, within=90.0)
        await swarm.grows("p0")
        swarm.start(leaver)
        await ends_well(swarm)

    play(scene)


@in_company
def test_a_member_dies_and_comes_again_with_nothing(count: int, who: str) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        late = f"p{count - 1}"
        await swarm.kill(late)
        # Of two, one is no majority: the other waits for eight void cycles.
        await swarm.until(swarm.all_members, within=90.0 if count > 2 else 450.0)
        await swarm.grows("p0")
        swarm.start(late)
        await ends_well(swarm)

    play(scene)


@everywhere
@pytest.mark.parametrize("loop_counts", [False, True], ids=["clock-stood-still", "clock-went-on"])
def test_everybody_sleeps_for_a_weekend_and_training_goes_on(count: int, who: str, loop_counts: bool) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        await swarm.grows("p0")
        await swarm.sleep_for(WEEKEND_SECONDS, loop_counts=loop_counts)
        await ends_well(swarm)
        assert all(roster.epoch == 0 for roster in swarm.last_rosters), "nobody gave the others up"

    play(scene)


@everywhere
def test_everybody_sleeps_and_finds_all_links_broken(count: int, who: str) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        await swarm.grows("p0")
        await swarm.sleep_for(WEEKEND_SECONDS, loop_counts=False)
        await swarm.break_links()
        await ends_well(swarm)

    play(scene)


@everywhere
@pytest.mark.parametrize("polite", [False, True], ids=["killed", "left"])
def test_everybody_stops_for_a_weekend_and_comes_again(count: int, who: str, polite: bool) -> None:
    async def scene() -> None:
        swarm = await grown(count, who)
        await swarm.grows("p0")
        names = [machine.name for machine in swarm.living()]
        for name in names:
            if polite:
                await swarm.leave(name)
            else:
                swarm.save(name)
                await swarm.kill(name)
        await swarm.run(60.0)
        for name in reversed(names):
            swarm.start(name)
            await swarm.run(5.0)
        await ends_well(swarm)

    play(scene)
