"""A grid whose reducers have partly died: live peers linked with a leader can still certify the next roster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import CYCLE_SECONDS, ROUND_SECONDS, peer_id, run_rules
from made import certify, founding, heartbeat, ids, member, membership_of, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.grid import column_mates, fold_roster, row_mates
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.stall import PATIENT_STALLS
from p2p_diloco.protocol.wire.ballot import Promised, Proposal, Vote
from p2p_diloco.protocol.wire.roster import Roster, lead_order

GROUP_SIZE = 2
VOTING, LISTENED_CYCLES = 13, 6
NOW = VOTING * ROUND_SECONDS + 0.1
ROSTER = replace(roster_of(8), members=tuple(member(p, reduces=n < 4) for n, p in enumerate(ids(8))))
GRID = fold_roster(ROSTER, GROUP_SIZE)
REDUCERS = GRID.reducers()
STALLED = run_rules().stalled_cycles


def lead_of(*, degraded: bool) -> PeerId:
    return lead_order(ROSTER, VOTING, peer_id("boot"), degraded=degraded)[0]


LEAD = lead_of(degraded=False)
MATES = row_mates(GRID, LEAD)
"""Two rows of four, each with two reducers and two members at home."""


def elect(living: frozenset[PeerId], *, cycles_without_entries: int, lead_remembers: bool = True) -> Roster:
    """Run one ballot of the live peers over links between its leader and each of them; return the leader's result.

    They have listened for four cycles and longer, and heard every live peer that can be heard.
    """
    chosen = lead_of(degraded=cycles_without_entries >= STALLED)
    assert chosen in living
    swarm: dict[PeerId, Membership] = {}
    for peer in sorted(living):
        forgot = peer == chosen and not lead_remembers
        swarm[peer] = membership_of(
            peer,
            founding(),
            certify(ROSTER, [peer_id("boot")]),
            group_size=GROUP_SIZE,
            remembers=not forgot,
            incarnation=1 + forgot,
        )
        swarm[peer].stall.cycles_without_entries = cycles_without_entries
        swarm[peer].local.set_ready(True)
        for seconds in range(int(LISTENED_CYCLES * CYCLE_SECONDS), 0, -4):
            swarm[peer].tick(NOW - seconds)
        near = GRID.neighbours(peer) if peer != chosen else ROSTER.peers()
        for other in living & near - {peer}:
            swarm[peer].liveness.take(heartbeat(other), NOW)
    under_way = [(peer, send) for peer, each in swarm.items() for send in sends(each.tick(NOW))]
    while under_way:
        sender, send = under_way.pop()
        if send.to in living and chosen in (sender, send.to):
            under_way += [(send.to, answer) for answer in sends(hear(swarm[send.to], sender, send))]
    in_force = swarm[chosen].book.in_force
    assert in_force is not None
    return in_force


def sends(actions: list[Action]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send)]


def hear(here: Membership, sender: PeerId, send: Send) -> list[Action]:
    match send.message:
        case Promised() as word:
            return here.balloting.take_promise(sender, word, NOW)
        case Vote() as word:
            return here.balloting.take_vote(sender, word, NOW)
        case Proposal() as word:
            return here.balloting.take_proposal(sender, word, NOW)
        case _:
            return []


@pytest.mark.parametrize(
    "dead",
    [(MATES & REDUCERS) | column_mates(GRID, LEAD), REDUCERS - {LEAD}],
    ids=["one of each row", "all reducers but the lead"],
)
def test_a_majority_linked_with_a_leader_drops_dead_reducers(dead: frozenset[PeerId]) -> None:
    in_force = elect(ROSTER.peers() - dead, cycles_without_entries=0)
    assert (in_force.k, in_force.degraded) == (2, False)
    assert in_force.peers() == ROSTER.peers() - dead
    assert any(each.reduces for each in in_force.members)


def test_nothing_is_certified_if_no_member_is_dead() -> None:
    assert elect(ROSTER.peers(), cycles_without_entries=0) == ROSTER


@pytest.mark.parametrize("lead_remembers", [True, False])
def test_a_quarter_linked_with_a_leader_continues_a_stalled_run(lead_remembers: bool) -> None:
    """A leader that lost its disk has no vote and needs none: the peers that promised still get its proposal."""
    chosen = lead_of(degraded=True)
    two = frozenset(sorted(ROSTER.peers() - REDUCERS - {chosen})[:2])
    in_force = elect(two | {chosen}, cycles_without_entries=STALLED, lead_remembers=lead_remembers)
    assert (in_force.k, in_force.degraded) == (2, True)
    assert in_force.peers() == two | {chosen}, "of whom nothing is heard nobody is taken to live"


def test_less_than_a_quarter_waits_four_times_as_long() -> None:
    alone = frozenset({lead_of(degraded=True)})
    assert elect(alone, cycles_without_entries=STALLED) == ROSTER
    assert elect(alone, cycles_without_entries=PATIENT_STALLS * STALLED - 1) == ROSTER
    in_force = elect(alone, cycles_without_entries=PATIENT_STALLS * STALLED)
    assert (in_force.degraded, in_force.peers()) == (True, alone)
