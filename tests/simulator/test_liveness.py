"""From when a member must be in entries: whom the check of quiet rounds accuses, and whom not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.protocol.membership.stall import PATIENT_STALLS
from p2p_diloco.protocol.wire.entry import pack_included, places_in
from simulator.inspector import Violated
from simulator.liveness import check_included
from simulator.run import run_rules
from simulator.simulation import Simulation

QUIET_CYCLES = 6


async def grown(swarm: Simulation) -> int:
    """Let three peers train for some quiet cycles under one roster; return the round in which these began."""
    for name in ("p0", "p1", "p2"):
        swarm.add(name, founds=name == "p0")
    await swarm.until(swarm.all_members, within=120.0)
    await swarm.run(200.0)  # until all vote
    first_round = swarm.round
    await swarm.run(QUIET_CYCLES * swarm.rules.cycle_seconds)
    return first_round


def leave_out(swarm: Simulation, name: str, first_round: int) -> None:
    """Change the entries on record since a round: they do not include a machine."""
    entries = swarm.inspector.entries
    for digest, entry in list(entries.items()):
        roster = swarm.inspector.rosters[entry.roster]
        included = set(places_in(entry.included)) - {roster.position(swarm.machines[name].peer)}
        if entry.round >= first_round:
            entries[digest] = replace(entry, included=pack_included(included, len(roster.members)))


def degrade(swarm: Simulation, name: str, *, back: int) -> None:
    """Change a roster on record, the one in force or one before it: it is degraded."""
    roster = swarm.machines[name].running.book.chain()[-1 - back].roster
    swarm.inspector.rosters[roster.digest()] = replace(roster, degraded=True)


def follow(swarm: Simulation, name: str, *, back: int, at_round: int | None) -> None:
    """Change when a machine followed a roster; None: it has not."""
    machine = swarm.machines[name]
    digest = machine.running.book.chain()[-1 - back].roster.digest()
    machine.followed_at.pop(digest, None)
    if at_round is not None:
        machine.followed_at[digest] = swarm.rules.clock.begin(at_round) + swarm.rules.clock.round_seconds / 2


def small_swarm() -> Simulation:
    return Simulation(seed=1, rules=run_rules(num_spans=(2, 2)), as_bytes=False)


async def test_a_member_that_is_in_no_entry_is_reported() -> None:
    async with small_swarm() as swarm:
        first_round = await grown(swarm)
        check_included(swarm, first_round)
        leave_out(swarm, "p1", first_round)
        with pytest.raises(Violated, match=r"I7: p1 is in 0 of \d+ entries of quiet rounds"):
            check_included(swarm, first_round)


@pytest.mark.parametrize("back", [0, 1])
async def test_a_member_counts_from_two_cycles_after_it_followed_the_last_degraded_roster(back: int) -> None:
    """Not all stalls end in one cycle, and the others make entries before the last one follows (seed 70249).

    With `back`, the degraded roster is the parent of the one that the entries name: it must be followed first.
    """
    async with small_swarm() as swarm:
        first_round = await grown(swarm)
        leave_out(swarm, "p1", first_round)
        degrade(swarm, "p1", back=back)
        follow(swarm, "p1", back=back, at_round=swarm.round - 2 * swarm.rules.clock.num_fragments)
        check_included(swarm, first_round)
        follow(swarm, "p1", back=back, at_round=first_round)
        with pytest.raises(Violated, match=r"I7: p1 is in 0 of \d+ entries of quiet rounds"):
            check_included(swarm, first_round)


@pytest.mark.parametrize("long_ago", [False, True])
async def test_a_member_that_never_followed_a_degraded_roster_is_reported_after_a_long_stall(long_ago: bool) -> None:
    async with small_swarm() as swarm:
        first_round = await grown(swarm)
        if long_ago:
            await swarm.run(PATIENT_STALLS * swarm.rules.stalled_cycles * swarm.rules.cycle_seconds)
        leave_out(swarm, "p1", first_round)
        degrade(swarm, "p1", back=0)
        follow(swarm, "p1", back=0, at_round=None)
        if not long_ago:
            check_included(swarm, first_round)
            return
        with pytest.raises(Violated, match=r"I7: p1 is in 0 of \d+ entries of quiet rounds"):
            check_included(swarm, first_round)
