"""Faults that simulations have found in `protocol/`, found by seeds and retold here as small scripted scenes."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.liveness import cycles_until_it_goes_on, fragment_heights
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import ROUND_SECONDS, run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

REDUCES_AFTER = 12 * ROUND_SECONDS
"""Cycles of one round: after eight of them, all reachable members reduce."""


def told(*, seed: int = 1, **rules: Any) -> Simulation:
    return Simulation(seed=seed, rules=run_rules(**rules), as_bytes=False)


def add_peers(swarm: Simulation, count: int, *, num_open: int | None = None) -> None:
    """Add a bootstrap peer, and peers of which only the first can be dialled."""
    swarm.add("boot", trains=False, founds=True)
    for place in range(count):
        swarm.add(f"p{place}", place=OPEN if num_open is None or place < num_open else OUTBOUND_ONLY)


async def goes_on(swarm: Simulation, within: float) -> None:
    heights = fragment_heights(swarm)
    await swarm.run(within)
    assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True)), swarm.describe()


def begin_of_next_round(swarm: Simulation) -> float:
    return (swarm.now // ROUND_SECONDS + 1) * ROUND_SECONDS


async def test_a_joiner_of_a_run_of_one_fragment_becomes_ready_while_it_continues() -> None:
    """Its boundary was always a round behind, so it was never compared at a tip that both sides held."""
    async with told(num_spans=(2,)) as swarm:
        add_peers(swarm, 2)
        await swarm.until(swarm.agreed, 60.0)
        await swarm.run(20.0)
        swarm.add("late")
        await swarm.until(lambda: swarm.machines["late"].running.ready, 2 * ROUND_SECONDS)
        await swarm.until(swarm.all_members, 3 * ROUND_SECONDS)


async def test_clocks_that_differ_slightly_cause_no_skipped_round() -> None:
    """Promises of peers ahead let a leader certify before its own round began; it then followed another roster."""
    async with told(num_spans=(2, 2)) as swarm:
        swarm.add("boot", trains=False, founds=True)
        for place, offset in enumerate((-0.4, 0.4, 0.4, -0.4, 0.0)):
            swarm.add(f"p{place}", wall_offset=offset)
        await swarm.until(swarm.all_members, 60.0)
        await swarm.run(20.0)
        for machine in swarm.running():
            machine.closed.clear()
        await swarm.run(200.0)
        for machine in swarm.running():
            assert {closed.num_entries for closed in machine.closed} == {2}, machine
            assert {closed.num_included for closed in machine.closed} == {10}, machine


async def test_a_joiner_with_a_single_donor_corrects_what_differs_from_it() -> None:
    """It waited for a second accuser. At home, behind one bootstrap peer, there is none, so it never became ready."""
    async with told(scrub_cycles=64) as swarm:
        add_peers(swarm, 3, num_open=0)
        await swarm.until(lambda: swarm.all_members() and swarm.agreed(), 60.0)
        await swarm.run(40.0)
        assert swarm.flip_bit("p1", swarm.spans[0], 0, 20)
        await swarm.run(40.0)  # a checkpoint holds the wrong bit now
        swarm.kill("p1")
        await swarm.run(1.0)
        swarm.start("p1")
        await swarm.until(lambda: swarm.machines["p1"].running.ready and not swarm.inspector.differing, 60.0)
        assert "content" in swarm.machines["p1"].topics


async def test_a_joiner_whose_donor_sends_one_heartbeat_per_round_becomes_ready() -> None:
    """Its donor's heartbeats came right after the entries, so the two never compared the same heads."""
    async with told(num_spans=(1, 1), heartbeat_seconds=8.0) as swarm:
        add_peers(swarm, 3, num_open=0)
        await swarm.until(swarm.all_members, 120.0)
        await swarm.run_to(40 * ROUND_SECONDS - 0.5)
        for place in range(3, 9):
            swarm.add(f"p{place}", place=OUTBOUND_ONLY)
            await swarm.run(1.0)
        await swarm.until(lambda: all(machine.running.ready for machine in swarm.running()), 40.0)


async def test_a_joiner_ahead_of_a_donor_that_reports_just_before_a_round_becomes_ready() -> None:
    """The donor's report was about one boundary, and the joiner's clock already showed the next: never compared."""
    async with told(num_spans=(2,), heartbeat_seconds=8.0) as swarm:
        swarm.add("p0", founds=True)
        await swarm.until(swarm.all_members, 60.0)
        await swarm.run_to(begin_of_next_round(swarm) + 1.5 * ROUND_SECONDS)
        swarm.add("late", place=OUTBOUND_ONLY, wall_offset=0.4)
        await swarm.until(lambda: swarm.machines["late"].running.ready, 3 * ROUND_SECONDS)


@pytest.mark.parametrize("num_hidden", [1, 2, pytest.param(13, marks=pytest.mark.long)])
async def test_the_bootstrap_serves_all_again_when_the_last_dialable_member_is_gone(num_hidden: int) -> None:
    """Members behind routers saw only the dead member, which alone could lead a grid, and waited forever."""
    async with told(num_spans=(2, 2), group_size=2, stalled_cycles=2) as swarm:
        swarm.add("boot", trains=False, founds=True)
        swarm.add("open")
        for place in range(num_hidden):
            swarm.add(f"p{place}", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_members, 120.0)
        await swarm.run(20.0)
        swarm.kill("open")
        await swarm.until(swarm.all_members, 6 * swarm.rules.cycle_seconds)
        await goes_on(swarm, 12 * ROUND_SECONDS)
        swarm.start("open")
        await swarm.until(swarm.all_members, 40 * ROUND_SECONDS)
        await swarm.until(swarm.agreed, 8 * ROUND_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("founder_lives", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_grid_continues_when_its_only_remaining_reducer_lost_its_disk(founder_lives: bool) -> None:
    """The others promised it their votes but never received a proposal, and the bootstrap left the lead to it."""
    async with told(num_spans=(2,), group_size=2, stalled_cycles=3, heartbeat_seconds=2.0) as swarm:
        add_peers(swarm, 16, num_open=8)
        await swarm.until(swarm.all_members, 120.0)
        await swarm.run(REDUCES_AFTER)
        grid = swarm.machines["p0"].running.book.grid()
        assert grid is not None
        assert len(grid.rows) > 1
        left = grid.columns[0][0]
        dead = {swarm.by_peer[peer].name for peer in grid.reducers() | set(grid.rows[grid.row_of[left]])}
        forgetful = swarm.by_peer[left].name
        for name in sorted(dead if founder_lives else dead | {"boot"}):
            swarm.wipe(name) if name == forgetful else swarm.kill(name)
        swarm.start(forgetful)
        await swarm.run(1.0)
        await swarm.until(swarm.all_members, 90 * ROUND_SECONDS)
        await goes_on(swarm, 8 * ROUND_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, *(pytest.param(place, marks=pytest.mark.long) for place in (3, 6))])
async def test_a_grid_continues_without_its_founder_whichever_reducer_is_left(place: int) -> None:
    """The first roster without a majority kept the rows that it heard nothing from, whose reducers were all dead."""
    async with told(num_spans=(2,), group_size=2, stalled_cycles=1, heartbeat_seconds=2.0) as swarm:
        add_peers(swarm, 16, num_open=11)
        await swarm.until(swarm.all_members, 120.0)
        await swarm.run(REDUCES_AFTER)
        grid = swarm.machines["p0"].running.book.grid()
        assert grid is not None
        reducers = [swarm.by_peer[peer].name for column in grid.columns for peer in column]
        for name in sorted(swarm.machines.keys() - {reducers[place], "p14", "p15"}):
            swarm.kill(name)
        await swarm.until(swarm.all_members, 60 * ROUND_SECONDS)


@pytest.mark.slow
async def test_two_branches_with_grids_merge_again() -> None:
    """Each branch kept links with its own members only and never learned of the other."""
    async with told(seed=4, num_spans=(2,), group_size=2, stalled_cycles=1) as swarm:
        add_peers(swarm, 9)
        names = [f"p{place}" for place in range(9)]
        await swarm.until(swarm.all_members, 120.0)
        await swarm.run(20.0)
        here, there = names[:5], names[5:]
        swarm.partition(here, [*there, "boot"])
        await swarm.until(lambda: all(swarm.members(name) == set(here) for name in here), 30 * ROUND_SECONDS)
        await swarm.until(lambda: all(swarm.members(name) == set(there) for name in there), 30 * ROUND_SECONDS)
        await swarm.run(8 * ROUND_SECONDS)
        swarm.heal()
        await swarm.until(swarm.all_members, 20 * ROUND_SECONDS)
        await swarm.until(swarm.agreed, 4 * ROUND_SECONDS)


async def test_no_progress_is_promised_after_the_last_holders_of_the_state_lost_their_disks() -> None:
    async with told(num_spans=(2,)) as swarm:
        add_peers(swarm, 2)
        await swarm.until(swarm.agreed, 60.0)
        await swarm.run(20.0)
        for name in ("p0", "p1"):
            swarm.wipe(name)
        swarm.kill("boot")
        for name in ("p0", "p1"):
            swarm.start(name)
        await swarm.run(10 * ROUND_SECONDS)
        assert cycles_until_it_goes_on(swarm) is None
        assert not any(machine.running.ready for machine in swarm.running()), "a fresh start is never the truth"


async def test_two_peers_continue_at_once_after_one_was_restored_from_an_old_backup() -> None:
    """It counted as an earlier incarnation than the one known to the other, which therefore ignored it."""
    async with told(num_spans=(1,)) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1")
        await swarm.until(swarm.all_members, 60.0)
        await swarm.until(lambda: all(m.counts for m in swarm.machines["p0"].roster.members), 12 * ROUND_SECONDS)
        backup = swarm.snapshot("p1")
        for _ in range(2):
            swarm.kill("p1")
            await swarm.run(1.0)
            swarm.start("p1")
            await swarm.until(swarm.all_members, 6 * ROUND_SECONDS)
        swarm.kill("p1")
        await swarm.run(1.0)
        swarm.restore("p1", backup)
        swarm.start("p1")
        await swarm.until(swarm.all_members, 6 * ROUND_SECONDS)
        await goes_on(swarm, 2 * ROUND_SECONDS)
