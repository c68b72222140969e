"""Promises and votes of a member, and the rounds in which they keep it from naming parents."""

from __future__ import annotations

from council import (
    BALLOT,
    LEAD,
    NEW,
    NOW,
    OTHER,
    ROSTER,
    THIRD,
    TURN_SECONDS,
    VOTING,
    A,
    B,
    C,
    Council,
    member_of_three,
    proposal,
    sent,
    topics,
)
from fake_run import ROUND_SECONDS
from made import certify, child_of, founding, membership_of, roster_1

from p2p_diloco.protocol.actions import Report, Send
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.wire.ballot import Promised, Vote
from p2p_diloco.protocol.wire.roster import CertifiedRoster


def test_a_peer_that_lost_its_memory_does_not_vote_before_its_incarnation_is_listed() -> None:
    for remembers, incarnation, votes in ((False, 2, False), (True, 2, True), (False, 1, True)):
        here = member_of_three(remembers=remembers, incarnation=incarnation)
        assert bool(sent(here.tick(NOW), Promised)) is votes


def test_a_voter_names_no_parent_under_the_old_roster_in_later_rounds() -> None:
    here, digest = member_of_three(), ROSTER.digest()
    assert here.votes.may_name_parents(digest, VOTING + 9)
    here.balloting.take_proposal(LEAD, proposal(), NOW)
    assert here.votes.may_name_parents(digest, VOTING), "should it be certified, it governs the next round"
    assert not here.votes.may_name_parents(digest, VOTING + 1)
    assert here.votes.may_name_parents(proposal().roster.digest(), VOTING + 1)


def test_a_later_vote_does_not_let_a_member_name_parents_again() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, OTHER, NOW, cycle=1)
    council.is_lost = lambda sender, to, message: isinstance(message, Vote)
    for turn in range(6):
        council.tick(NOW + turn * TURN_SECONDS)
    here = council.here[OTHER]
    assert here.votes.promised_round() == VOTING + 1
    assert not here.votes.may_name_parents(ROSTER.digest(), VOTING + 1), "the first vote may have been enough"


def test_a_vote_for_a_grandchild_lets_no_member_name_parents_under_the_grandparent() -> None:
    """The child may have been certified for the next round, and known to one peer only."""
    council = Council(roster_1(3), NEW)
    council.declare(NEW, OTHER, NOW, cycle=1)
    council.tick(NOW)
    child = council.in_force()
    assert child.k == 2
    word = council.here[THIRD].leave(NOW)
    for peer in sorted(ROSTER.voters - {THIRD}):
        council.do(THIRD, [Send(to=peer, message=word, deadline=NOW + 9)], NOW)
    for turn in range(LEAD_TURNS):
        council.tick(NOW + turn * TURN_SECONDS)
    assert council.in_force().k == 3
    here = council.here[OTHER]
    assert not here.votes.may_name_parents(child.digest(), VOTING + 2)
    assert here.votes.may_name_parents(ROSTER.digest(), VOTING)
    assert not here.votes.may_name_parents(ROSTER.digest(), VOTING + 1)


def test_no_peer_votes_in_a_ballot_before_the_last_round_in_which_it_named_parents() -> None:
    """Certified in that ballot, the child would govern a round in which this peer named parents under its parent."""
    here = member_of_three()
    here.votes.parents_named(VOTING + 1)
    assert here.balloting.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS) == []
    here = member_of_three()
    here.votes.parents_named(VOTING)
    assert here.balloting.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS)


def test_an_own_vote_that_is_not_on_disk_is_reported_once() -> None:
    """This means a restored backup, or a copy that runs elsewhere: nothing else tells the user."""
    first = roster_1(3)
    second = certify(child_of(first.roster, first.roster.members), [A, B], ballot=BALLOT)
    third = certify(child_of(second.roster, second.roster.members), [A, B], ballot=BALLOT + 1)

    def said(here: Membership, *rosters: CertifiedRoster) -> list[str]:
        actions = here.rosters.take(rosters, NOW)
        return [action.text for action in actions if isinstance(action, Report) and action.topic == "identity"]

    assert said(membership_of(A, founding(), first), second, third) == [
        "roster 2 carries a vote of this peer that its state directory does not hold: either the directory was "
        "restored from a backup (nothing to do), or another process uses a copy of it (stop one of them, and give it "
        "its own state directory)"
    ]
    assert said(membership_of(C, founding(), first), second, third) == [], "others certified it"
    assert said(membership_of(A, founding(), first, remembers=False), second) == [], "it knows that it has forgotten"


def test_an_own_vote_that_is_on_disk_is_not_reported() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, C, NOW, cycle=1)
    actions = council.tick(NOW)
    assert council.in_force().k == 2
    assert "identity" not in topics(actions)
