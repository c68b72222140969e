"""A grid of which reducers have died: whoever is left and linked with a lead can still certify the next roster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ROUND_SECONDS, peer_id
from made import certify, founding, heartbeat, ids, member, membership_of, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.ballot import Promise, Vote
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.overlay import column_mates, row_mates
from p2p_diloco.protocol.roster import lead_order
from p2p_diloco.protocol.roster_delta import ProposalDelta

GROUP_SIZE = 2
VOTING = 3
NOW = VOTING * ROUND_SECONDS + 0.1
ROSTER = replace(roster_of(8), members=tuple(member(p, dialable=n < 4) for n, p in enumerate(ids(8))))
GRID = fold_roster(ROSTER, GROUP_SIZE)
REDUCERS = GRID.reducers()
LEAD = lead_order(ROSTER, VOTING, REDUCERS)[0]
MATES = row_mates(GRID, LEAD)
"""Two rows of four, each with two reducers and two members at home."""


def elect(living: frozenset[PeerId], *, void_cycles: int, lead_remembers: bool) -> Membership:
    """Let those who live take part in one election by links between the lead and each of them; return the lead."""
    swarm: dict[PeerId, Membership] = {}
    for peer in sorted(living):
        forgot = peer == LEAD and not lead_remembers
        swarm[peer] = membership_of(
            peer,
            founding(),
            certify(ROSTER, [peer_id("boot")]),
            group_size=GROUP_SIZE,
            remembers=not forgot,
            incarnation=1 + forgot,
        )
        swarm[peer].void_cycles = void_cycles
        swarm[peer].ready = True
    lead = swarm[LEAD]
    for peer in living - {LEAD}:
        lead.hear(heartbeat(peer), NOW)
    under_way = [(peer, send) for peer, each in swarm.items() for send in sends(each.tick(NOW))]
    while under_way:
        sender, send = under_way.pop()
        if send.to in living and LEAD in (sender, send.to):
            under_way += [(send.to, answer) for answer in sends(hear(swarm[send.to], sender, send))]
    return lead


def sends(actions: list[Action]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send)]


def hear(here: Membership, sender: PeerId, send: Send) -> list[Action]:
    match send.message:
        case Promise() as word:
            return here.take_promise(sender, word, NOW)
        case Vote() as word:
            return here.take_vote(sender, word, NOW)
        case ProposalDelta() as word:
            proposal = here.rebuilt(sender, word, NOW)
            return here.take_proposal(sender, proposal, NOW)  # type: ignore[arg-type]
        case _:
            return []


@pytest.mark.parametrize(
    ("dead", "void_cycles", "lead_remembers"),
    [
        (frozenset[PeerId](), 0, True),
        ((MATES & REDUCERS) | column_mates(GRID, LEAD), 4, True),
        (REDUCERS - {LEAD}, 4, True),
        (REDUCERS - {LEAD} | MATES, 8, False),
    ],
    ids=["nobody", "one of each row", "all reducers but the lead", "and the row of a lead without a vote"],
)
def test_those_who_live_and_are_linked_with_a_lead_certify_a_roster(
    dead: frozenset[PeerId], void_cycles: int, lead_remembers: bool
) -> None:
    """The last is seed 5866: who promised never heard the proposal, which went to the dead of the lead's row and column
    only; it had lost its own vote with its disk. In the two before, a majority lived and could not go on."""
    lead = elect(ROSTER.peers() - dead, void_cycles=void_cycles, lead_remembers=lead_remembers)
    in_force = lead.book.in_force
    assert in_force is not None
    assert (in_force.k, in_force.is_degraded()) == (2, void_cycles == 8)
    assert in_force.peers() >= ROSTER.peers() - dead


@pytest.mark.parametrize(("void_cycles", "names_silent_rows"), [(4, True), (8, False)])
def test_below_a_majority_nobody_is_taken_to_live_of_whom_nothing_is_heard(
    void_cycles: int, names_silent_rows: bool
) -> None:
    """A majority keeps rows whose reducer is silent; below it the next grid would have dead reducers once more."""
    living = ROSTER.peers() - (REDUCERS - {LEAD})
    in_force = elect(living, void_cycles=void_cycles, lead_remembers=True).book.in_force
    assert in_force is not None
    assert in_force.k == 2
    assert (in_force.peers() > living) == names_silent_rows
    assert (in_force.peers() == living) != names_silent_rows
