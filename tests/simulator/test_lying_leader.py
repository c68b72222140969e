"""A leader that lies: its node is sound, but its proposals do not follow from the promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from p2p_diloco.ids import short_peer_id
from p2p_diloco.protocol.wire.ballot import Proposal
from p2p_diloco.protocol.wire.member import FULL_SHARE, Member
from p2p_diloco.protocol.wire.messages import Message, RosterReply
from p2p_diloco.protocol.wire.roster import Roster, lead_order
from simulator.coverage import longest_gap, share_of_spans
from simulator.hostility import telling
from simulator.lies import lone_vote
from simulator.machine import Machine
from simulator.run import key_named, run_rules, signer
from simulator.simulation import Simulation

HONEST = ("p0", "p1", "p2")
VICTIM, FRIEND = key_named("p1").peer, key_named("friend").peer
Lie = Callable[[Proposal], Proposal | RosterReply]


def with_members(proposal: Proposal, members: list[Member], **changes: object) -> Proposal:
    """Return a proposal with other members, in the order of a valid roster: reducers first."""
    ordered = tuple(sorted(members, key=lambda member: not member.reduces))
    return replace(proposal, roster=replace(proposal.roster, members=ordered, **changes))  # type: ignore[arg-type]


def with_victim(proposal: Proposal, **changes: object) -> Proposal:
    """Return a proposal that gives the victim another role."""
    return with_members(
        proposal,
        [replace(m, **changes) if m.peer == VICTIM else m for m in proposal.roster.members],  # type: ignore[arg-type]
    )


def drop(proposal: Proposal) -> Proposal:
    return with_members(proposal, [member for member in proposal.roster.members if member.peer != VICTIM])


def list_a_friend(proposal: Proposal) -> Proposal:
    friend = Member(peer=FRIEND, incarnation=1, since=proposal.roster.cycle, reduces=False)
    return with_members(proposal, [*proposal.roster.members, friend])


def too_few_promises(proposal: Proposal) -> Proposal:
    """Show only what two voters saw, which is less than a majority."""
    return replace(drop(proposal), promises=proposal.promises[:2])


def made_up_promise(proposal: Proposal) -> Proposal:
    """Make up a promise of another voter that would drop all members."""
    first, *others = proposal.promises
    view = replace(first.view, absent=b"\xff" * len(first.view.absent))
    return replace(drop(proposal), promises=(replace(first, view=view), *others))


def certify_alone(proposal: Proposal) -> RosterReply:
    """Distribute the roster without the victim, with only the leader's own vote."""
    liar = key_named("liar").peer
    return lone_vote(drop(proposal).roster, proposal.ballot, liar, signer(liar))


LIES: dict[str, Lie] = {
    "drops a member": drop,
    "takes a member's reduces": lambda proposal: with_victim(proposal, reduces=False),
    "takes a member's vote": lambda proposal: with_victim(proposal, counts=False),
    "lists a friend": list_a_friend,
    "writes another share": lambda proposal: with_victim(proposal, share=1),
    "claims 2^62 entries": lambda proposal: replace(proposal, roster=replace(proposal.roster, height=1 << 62)),
    "is of a cycle to come": lambda proposal: replace(proposal, roster=replace(proposal.roster, cycle=1 << 60)),
    "shows too few promises": too_few_promises,
    "shows a promise that it made up": made_up_promise,
    "certifies alone": certify_alone,
}


def lie_in_proposals(lie: Lie, message: Message) -> Message:
    return lie(message) if isinstance(message, Proposal) else message


async def until_it_leads_next(swarm: Simulation, liar: Machine) -> None:
    """Let time pass until the round before a vote in which the liar has the first turn, if no roster comes before."""
    clock, book = swarm.rules.clock, liar.running.book

    def is_first(ballot: int) -> bool:
        is_begin = clock.ends_cycle(ballot) and not clock.ends_cycle(ballot - 1)
        order = lead_order(liar.roster, clock.ballot_round(ballot), book.founder)
        return is_begin and order[clock.lead_turn(ballot)] == liar.peer

    ballot = clock.ballot_at(clock.begin(swarm.round + 2))
    while not is_first(ballot):
        ballot += 1
    await swarm.run_to_round(clock.ballot_round(ballot) - 1)


def roles(roster: Roster) -> list[tuple[bytes, bool, bool]]:
    return sorted((member.peer, member.counts, member.reduces) for member in roster.members)


@pytest.mark.long  # make size plays it
async def test_a_leader_with_an_invalid_proposal_is_reported_and_the_next_leader_succeeds() -> None:
    """Each lie gets its own ballot: a member's share changes, and the liar has the first turn."""
    async with Simulation(seed=1, rules=run_rules(num_spans=(2, 2), heartbeat_seconds=2.0), as_bytes=False) as swarm:
        for name in (*HONEST, "liar"):
            swarm.add(name, founds=name == "p0")
        await swarm.until(swarm.all_settled, within=300.0)
        liar, name = swarm.machines["liar"], short_peer_id(key_named("liar").peer)
        honest = [swarm.machines[each] for each in HONEST]
        begin, share = swarm.round, FULL_SHARE
        for text, lie in LIES.items():
            await until_it_leads_next(swarm, liar)
            before = liar.roster
            for machine in honest:
                machine.reports.clear()
            liar.lie(telling(partial(lie_in_proposals, lie)))
            share = 4 if share == FULL_SHARE else FULL_SHARE
            engine = swarm.machines["p2"].running
            engine.set_conditions(replace(engine.conditions, share=share))
            await swarm.run_to_round(swarm.round + 2)
            liar.lie(None)
            topic = "roster-refused" if lie is certify_alone else "proposal-refused"
            for machine in honest:
                assert any(name in said for said in machine.texts(topic)), (text, machine, machine.reports)
                after = machine.roster
                assert (after.k, after.parent) == (before.k + 1, before.digest()), (text, machine)
                assert roles(after) == roles(before), (text, machine)
                shares = {member.peer: member.share for member in after.members}
                assert shares.pop(key_named("p2").peer) == share, (text, machine)
                assert set(shares.values()) == {FULL_SHARE}, (text, machine)
        end = swarm.round
        await swarm.run_to_round(end + 12)
        assert share_of_spans(swarm, begin, end) >= 0.9
        assert share_of_spans(swarm, end, end + 12) >= 0.9
        assert longest_gap(swarm, begin, end + 12) <= 1
        await swarm.until(lambda: swarm.agreed(HONEST), 2 * swarm.rules.cycle_seconds)
