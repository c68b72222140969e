"""One hostile member among five, and a stranger: no honest process fails, and the honest peers continue together."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from itertools import count

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.node.budgets import LINES_PER_MINUTE
from p2p_diloco.protocol.wire.member import FULL_SHARE, Declaration
from p2p_diloco.protocol.wire.messages import Message, Opening, SpanVector
from simulator.coverage import share_of_spans
from simulator.hostility import MUTATORS, Caller, MutatorMaker, Outsider, Stranger, claims_reach, telling
from simulator.inspector import Violated
from simulator.liveness import check_agreement, check_tables, fragment_heights
from simulator.machine import Machine
from simulator.network import OUTBOUND_ONLY
from simulator.run import RUN, key_named, run_rules, sign_as
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

HONEST = ("p0", "p1", "p2", "p3")


async def settled(swarm: Simulation) -> None:
    for name in (*HONEST, "liar"):
        swarm.add(name, founds=name == "p0")
    await swarm.until(swarm.all_members, within=120.0)


@pytest.mark.parametrize(
    "lie",
    # `make size` plays all of them.
    [pytest.param(lie, marks=[pytest.mark.long] if number % 2 else []) for number, lie in enumerate(MUTATORS)],
)
async def test_one_lying_member_neither_ends_nor_splits_honest_peers(lie: str) -> None:
    async with Simulation(seed=1) as swarm:
        await settled(swarm)
        liar = swarm.machines["liar"]
        liar.lie(MUTATORS[lie](liar, random.Random(1)))
        await swarm.run(160.0)
        swarm.kill("liar")
        await swarm.run(80.0)
        heights = fragment_heights(swarm)
        await swarm.run(80.0)
        assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))
        await swarm.until(lambda: swarm.agreed(HONEST), within=40.0)


async def test_peers_split_by_a_roster_dated_a_day_ahead_need_not_agree() -> None:
    """Only the bootstrap votes, and receives one other clock, the liar's. A joiner takes it; a member does not."""
    async with Simulation(seed=1, rules=run_rules(num_spans=(1,), stalled_cycles=20)) as swarm:
        swarm.add("boot", trains=False, founds=True)
        for name in ("p0", "liar"):
            swarm.add(name)
        boot, liar = swarm.machines["boot"], swarm.machines["liar"]
        await swarm.until(swarm.all_members, within=60.0)
        swarm.network.mute([boot.peer, liar.peer, key_named("late").peer], [swarm.machines["p0"].peer])
        liar.lie(MUTATORS["is a day ahead"](liar, random.Random(1)))
        await swarm.until(lambda: boot.swarm_now() - swarm.loop.true_seconds() > 80_000.0, within=300.0)
        swarm.add("late")
        await swarm.until(lambda: swarm.machines["late"].running.ready, within=300.0)
        await swarm.run(40.0)
        p0, late = swarm.machines["p0"].running, swarm.machines["late"].running
        assert (p0.ready, late.ready) == (True, True), swarm.describe()
        assert not swarm.agreed(["p0", "late"]), swarm.describe()
        skipped = swarm.inspector.skipped
        check_agreement(swarm)
        assert swarm.inspector.skipped == skipped + 1
        liar.is_liar, liar.mutator = False, None
        with pytest.raises(Violated, match="are ready and differ"):
            check_agreement(swarm)


async def test_a_stranger_neither_ends_a_process_nor_stops_the_run() -> None:
    async with Simulation(seed=2) as swarm:
        await settled(swarm)
        stranger = Stranger(swarm, 3)
        stranger.begin()
        await swarm.run(80.0)
        assert len(stranger.linked_peers()) == len(swarm.machines)
        stranger.end()
        await swarm.run(20.0)
        heights = fragment_heights(swarm)
        await swarm.run(60.0)
        assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))


IDENTITIES = tuple(f"identity{number}" for number in range(8))
FIRST, SECOND = (key_named(name).peer for name in IDENTITIES[:2])


async def share_while_eight_claim(
    swarm: Simulation, lie: MutatorMaker, *, are_vouched_for: bool = False
) -> tuple[float, float]:
    """Return the share of spans that got entries while eight identities attack two volunteers at home, and after.

    The identities arrive together, and each stays; the roster lists two per cycle.
    """
    swarm.add("boot", trains=False, founds=True)
    for name in ("p0", "p1"):
        swarm.add(name, place=name)
    await swarm.until(swarm.all_members, within=120.0)
    await swarm.run_to_round(swarm.round + 3)
    first = swarm.round
    for name in IDENTITIES:
        identity = swarm.add(name, place=OUTBOUND_ONLY, believes_open=True, start=False)
        identity.is_vouched_for = are_vouched_for
        identity.lie(lie(identity, random.Random(name)))
        swarm.start(name)
    await swarm.run_to_round(first + 24)
    for name in IDENTITIES:
        swarm.kill(name)
    await swarm.run_to_round(first + 32)
    during = share_of_spans(swarm, first, first + 22)
    return during, share_of_spans(swarm, first + 24, first + 30)


@pytest.mark.parametrize(
    "lie",
    [
        claims_reach(key_named("boot").peer, is_forged=True),
        claims_reach(FIRST, SECOND),
        claims_reach(key_named("p0").peer, is_forged=True),
    ],
    ids=["forged proofs of the bootstrap", "proofs of their own", "forged proofs of a member"],
)
async def test_eight_identities_that_claim_reachability_without_contributing_stop_no_span(lie: MutatorMaker) -> None:
    """Two honest volunteers behind routers, and a bootstrap that averages for them."""
    async with Simulation(seed=3) as swarm:
        during, after = await share_while_eight_claim(swarm, lie)
        assert during >= 0.9
        assert after >= 0.9
        rosters = swarm.inspector.rosters.values()
        reduced = {member.peer for roster in rosters for member in roster.members if member.reduces}
        assert reduced == {swarm.machines["boot"].peer}


async def test_eight_claims_that_are_believed_cost_entries() -> None:
    """A control for the test above: with proofs that count, the same identities own spans and withhold entries."""
    async with Simulation(seed=3) as swarm:
        during, _ = await share_while_eight_claim(swarm, claims_reach(), are_vouched_for=True)
        assert during < 0.7


async def four_that_count(swarm: Simulation) -> None:
    for name in HONEST:
        swarm.add(name, founds=name == "p0")
    await swarm.until(swarm.all_settled, within=300.0)


async def test_members_without_a_vote_that_name_bogus_parents_stop_no_span() -> None:
    """They are not in the electorate, so none of them need be present. Each is dropped, applies, and is listed again.

    Up to four are listed alongside the four that count; if they were asked, there would be no majority.
    """
    async with Simulation(seed=1, rules=run_rules(num_spans=(2, 2), heartbeat_seconds=2.0), as_bytes=False) as swarm:
        await four_that_count(swarm)
        first, liars = swarm.round, [swarm.add(name, place=OUTBOUND_ONLY, start=False) for name in IDENTITIES[:5]]
        for liar in liars:
            liar.lie(MUTATORS["names bogus parents"](liar, random.Random(1)))
            swarm.start(liar.name)
        await swarm.run_to_round(first + 16)
        assert max(len(roster.members) for roster in swarm.inspector.rosters.values()) >= 2 * len(HONEST)
        assert share_of_spans(swarm, first, swarm.round - 2) >= 0.9
        assert swarm.machines["p0"].roster.voters == {swarm.machines[name].peer for name in HONEST}
        await swarm.until(lambda: swarm.agreed(HONEST), within=2 * swarm.rules.cycle_seconds)


def empty_handed(message: Message) -> Message | None:
    """Open each round, name the right parents, and send nothing."""
    match message:
        case Opening():
            return replace(message, spans=tuple(replace(offer, sends=False) for offer in message.spans))
        case SpanVector():
            return None
        case _:
            return message


async def test_eight_identities_that_never_contribute_to_an_open_run_do_no_lasting_harm() -> None:
    """Four honest peers count. The roster lists two of the eight per cycle, and none of these comes to count."""
    async with Simulation(seed=1, rules=run_rules(num_spans=(2, 2), heartbeat_seconds=2.0), as_bytes=False) as swarm:
        await four_that_count(swarm)
        honest: list[Machine] = [swarm.machines[name] for name in HONEST]
        for machine in honest:
            machine.reports = deque()  # keeps all reports
        first, began = swarm.round, swarm.now
        for name in IDENTITIES:
            swarm.add(name, place=OUTBOUND_ONLY, start=False).lie(telling(empty_handed))
            swarm.start(name)
        await swarm.run_to_round(first + 14)
        listed = swarm.machines["p0"].roster
        assert listed.peers() >= {key_named(name).peer for name in IDENTITIES}
        assert listed.voters == {machine.peer for machine in honest}
        check_tables(swarm)
        minutes, end = (swarm.now - began) / 60.0, swarm.round
        lines = max(len(machine.reports) for machine in honest)
        for name in IDENTITIES:
            swarm.kill(name)
        await swarm.run_to_round(end + 10)
        assert share_of_spans(swarm, first, end) >= 0.9
        assert lines <= LINES_PER_MINUTE * len(IDENTITIES) * minutes
        assert share_of_spans(swarm, end, end + 8) >= 0.9
        assert swarm.machines["p0"].roster.peers() == {machine.peer for machine in honest}
        check_tables(swarm)
        await swarm.until(lambda: swarm.agreed(HONEST), within=2 * swarm.rules.cycle_seconds)


async def test_made_up_applicants_do_not_keep_out_a_volunteer_at_home() -> None:
    """Two are listed per cycle, in an order that no peer chooses, so a real applicant would rarely be among them."""
    async with Simulation(seed=1, rules=run_rules(num_spans=(2, 2), heartbeat_seconds=2.0)) as swarm:
        boot = swarm.add("boot", trains=False, founds=True)
        swarm.add("p0", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_members, within=120.0)
        async with Caller(swarm) as stranger:
            await stranger.dial(boot)
            late = swarm.add("p1", place=OUTBOUND_ONLY)
            begin, number = swarm.round, count()
            while late.peer not in boot.roster.peers() and swarm.round < begin + 12:
                for made_up in (key_named(f"made up {next(number)}").peer for _ in range(10)):
                    swarm.inspected[made_up] = Outsider("made up", made_up)
                    stranger.say(boot.peer, application(swarm, made_up))
                await swarm.run(0.5)
        assert next(number) > 40
        assert boot.roster.peers() == {machine.peer for machine in swarm.machines.values()}


def application(swarm: Simulation, peer: PeerId) -> Declaration:
    unsigned = Declaration(
        run=RUN,
        peer=peer,
        incarnation=1,
        cycle=swarm.rules.clock.cycle(swarm.round),
        proofs=(),
        trains=True,
        share=FULL_SHARE,
        leaving=False,
        signature=bytes(64),
    )
    return replace(unsigned, signature=sign_as(peer, unsigned.statement()))
