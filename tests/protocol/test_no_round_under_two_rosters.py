"""A voter for a child names no parent under the previous roster: lost messages, dead leaders, split votes.

The driver checks at every entry and certificate that no round runs under two rosters.
"""

from __future__ import annotations

import pytest
from fake_run import MINUTE, PAYLOAD_BYTES, ROUND_SECONDS, Machine
from founded_swarms import founded, goes_on, recovers
from made import change, entry_on, take_entry
from swarm_driver import Swarm

from p2p_diloco.protocol.wire.ballot import Promised, Proposal
from p2p_diloco.protocol.wire.entry import next_head
from p2p_diloco.protocol.wire.messages import Message, RosterReply

pytestmark = pytest.mark.story

# Counting lines makes a swarm three times as slow, and these tests cover no further lines.
Certificate = RosterReply


def voting(num_peers: int, group_size: int = 16) -> Swarm:
    """A swarm without a bootstrap whose peers have trained for long enough to vote and to reduce."""
    swarm = founded(num_peers, bootstrap=False, group_size=group_size)
    swarm.run(10 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert len(swarm.machines["p0"].roster.voters) == num_peers
    return swarm


def voting_round(swarm: Swarm) -> int:
    """Run to just before the last round of a cycle, with a change to vote on by then; return that round."""
    clock = swarm.rules.clock
    cycle = clock.cycle(clock.round_at(swarm.now)) + 1
    last = (cycle + 1) * clock.num_fragments - 1
    swarm.run_to(clock.begin(last) - 1.0)
    change(swarm.machines["p0"].rules_engine, share=4)
    return last


def newest(swarm: Swarm) -> int:
    return max(machine.roster.k for machine in swarm.running())


def rounds_with_entries(swarm: Swarm, first: int, last: int) -> list[int]:
    return sorted({entry.round for entry in swarm.entries.values() if first <= entry.round <= last})


@pytest.mark.parametrize(("num_peers", "group_size"), [(3, 16), (4, 16), (6, 2)])
def test_a_certificate_that_only_its_leader_holds_is_sent_again(num_peers: int, group_size: int) -> None:
    swarm = voting(num_peers, group_size)
    last, k = voting_round(swarm), newest(swarm)
    swarm.is_lost = lambda sender, target, message: isinstance(message, Certificate)
    swarm.run_to(swarm.rules.clock.begin(last + 1))
    holders = [machine.name for machine in swarm.running() if machine.roster.k > k]
    assert holders
    swarm.is_lost = lambda sender, target, message: isinstance(message, Certificate) and sender.name == holders[0]
    swarm.run_to(swarm.rules.clock.begin(last + 2))
    assert {machine.roster.k for machine in swarm.running()} == {k + 1}
    swarm.is_lost = lambda sender, target, message: False
    recovers(swarm, MINUTE)
    swarm.run_to(swarm.rules.clock.begin(last + 7))
    assert len(rounds_with_entries(swarm, last, last + 6)) >= 6, "one round is lost at most"


@pytest.mark.parametrize("num_peers", [2, 4, 5])
def test_half_of_the_votes_block_entries_for_a_round_and_then_take_effect(num_peers: int) -> None:
    """Neither the voters nor the others are a majority; a quarter of a round later, they all promise again."""
    swarm = voting(num_peers)
    last, k = voting_round(swarm), newest(swarm)
    deaf = {f"p{place}" for place in range(num_peers // 2, num_peers)}

    def is_lost(sender: Machine, target: Machine, message: Message) -> bool:
        return isinstance(message, Proposal) and target.name in deaf

    swarm.is_lost = is_lost
    swarm.run_to(swarm.rules.clock.begin(last + 1) + 0.1)
    swarm.is_lost = lambda sender, target, message: False
    swarm.run_to(swarm.rules.clock.begin(last + 2))
    assert {machine.roster.k for machine in swarm.running()} == {k + 1}
    swarm.run_to(swarm.rules.clock.begin(last + 7))
    assert len(rounds_with_entries(swarm, last, last + 6)) >= 6


def test_if_few_have_voted_the_others_continue_under_the_previous_roster() -> None:
    swarm = voting(5)
    last, k = voting_round(swarm), newest(swarm)
    clock = swarm.rules.clock
    swarm.is_lost = lambda sender, target, message: isinstance(message, Proposal) and target.name != "p0"
    swarm.run_to(clock.begin(last) + clock.turn_seconds - 0.1)
    swarm.is_lost = lambda sender, target, message: isinstance(message, Promised)
    voters = {machine.name for machine in swarm.running() if has_voted(machine, last)}
    assert 0 < len(voters) < 3
    swarm.run_to(clock.begin(last + 3))
    assert newest(swarm) == k
    assert rounds_with_entries(swarm, last, last + 2) == [last, last + 1, last + 2]
    swarm.is_lost = lambda sender, target, message: False
    recovers(swarm, MINUTE)


def has_voted(machine: Machine, round_index: int) -> bool:
    """Return whether a peer has voted in a round, and so names no parent under its roster in the next one."""
    membership = machine.rules_engine.membership
    return not membership.votes.may_name_parents(machine.roster.digest(), round_index + 1)


def test_a_dead_member_and_half_of_the_votes_block_nothing_for_long() -> None:
    swarm = voting(4)
    last, k = voting_round(swarm), newest(swarm)
    swarm.kill("p3")
    swarm.is_lost = lambda sender, target, message: isinstance(message, Proposal) and target.name == "p2"
    swarm.run_to(swarm.rules.clock.begin(last + 1) + 0.1)
    swarm.is_lost = lambda sender, target, message: False
    swarm.run_to(swarm.rules.clock.begin(last + 2))
    assert {machine.roster.k for machine in swarm.running()} == {k + 1}
    goes_on(swarm)


@pytest.mark.parametrize("seed", [1, 2])
def test_clocks_an_eighth_of_a_round_apart_cost_no_round(seed: int) -> None:
    swarm = Swarm(seed=seed)
    swarm.add("boot", trains=False, found=True)
    for place in range(4):
        swarm.add(f"p{place}", offset=(place - 1.5) * ROUND_SECONDS / 12)
    recovers(swarm, 3 * MINUTE)
    swarm.run_to_cycle_end()
    height, cycles = swarm.height("p0"), 12
    swarm.run(cycles * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert swarm.height("p0") - height >= cycles * sum(swarm.rules.num_spans) - max(swarm.rules.num_spans)


def test_a_peer_that_absorbed_an_entry_of_a_superseded_roster_recovers() -> None:
    """Only liars can make such an entry: it would need a majority that has named its parent."""
    swarm = voting(4)
    last, k = voting_round(swarm), newest(swarm)
    clock, victim = swarm.rules.clock, swarm.machines["p0"]
    swarm.is_lost = lambda sender, target, message: isinstance(message, Certificate) and target is victim
    swarm.run_to(clock.begin(last + 1) + 0.1)
    assert (victim.roster.k, newest(swarm)) == (k, k + 1)
    grid, new_grid = (swarm.machines[name].rules_engine.book.grid() for name in ("p0", "p1"))
    assert grid is not None
    assert new_grid is not None
    spans = [span for span in victim.vectors if span.fragment == clock.fragment(last + 1)]
    span = next(span for span in spans if new_grid.owner(span) != victim.peer)
    owner = grid.owner(span)
    assert owner is not None
    head = victim.vectors[span][0]
    variants = (
        entry_on(
            head,
            victim.roster,
            owner,
            span=span,
            round=last + 1,
            median_weight=head.median_weight,
            payload=bytes([n] * PAYLOAD_BYTES),
        )
        for n in range(256)
    )
    forged = max(variants, key=lambda entry: next_head(head, entry).digest)  # of two heads the smaller digest wins
    actions = take_entry(victim.rules_engine, owner, forged, swarm.now)
    assert victim.rules_engine.chains.heads[span].roster == victim.roster.digest()
    swarm.knows_forged = True
    swarm.perform(victim, actions)
    del swarm.entries[forged.digest()]
    swarm.is_lost = lambda sender, target, message: False
    recovers(swarm, 2 * MINUTE)
    digests = {entry.digest() for machine in swarm.running() for entry in machine.disk.entries.get(span, {}).values()}
    assert forged.digest() not in digests
