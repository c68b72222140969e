"""One member's part in ballots: what it promises, proposes, votes for and certifies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from council import (
    AFTER,
    AFTER_BEGIN,
    AFTER_LEAD,
    BALLOT,
    BOOT,
    LEAD,
    NEW,
    NOT_AFTER_LEAD,
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
    D,
    applicant,
    leader,
    member_of_three,
    promise_of,
    promised,
    proposal,
    sent,
)
from fake_run import ROUND_SECONDS, ballot_number, peer_id, verify
from made import NO_SIGNATURE, certify, child_of, declaration, founding, heartbeat, ids, member, membership_of, roster_1

from p2p_diloco.ids import ZERO_DIGEST, PeerId, short_peer_id
from p2p_diloco.protocol.actions import KeepBallots, KeepRoster, Report, Send
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.wire.ballot import Prepare, Promised, Proposal, Vote
from p2p_diloco.protocol.wire.messages import RosterReply


def test_a_declaration_known_to_one_voter_is_in_the_certified_roster() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, C, NOW, cycle=1)
    actions = council.tick(NOW)
    assert council.in_force().peers() == ROSTER.peers() | {NEW}
    assert council.in_force().k == 2
    assert sum(isinstance(action, KeepRoster) for action in actions) == 4, "all keep it, the newcomer too"
    assert {action.to for action in sent(actions, Proposal)} == {OTHER, THIRD}


def test_nothing_is_proposed_or_certified_if_nothing_changes() -> None:
    council = Council(roster_1(3))
    for turn in range(LEAD_TURNS):
        actions = council.tick(NOW + turn * TURN_SECONDS)
        assert not sent(actions, Proposal)
    assert council.in_force() == ROSTER


def test_a_dead_leader_costs_one_turn() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, OTHER, NOW, cycle=1)
    council.is_lost = lambda sender, to, message: LEAD in (sender, to)
    for turn in range(LEAD_TURNS):
        council.tick(NOW + turn * TURN_SECONDS)
    roster = council.here[OTHER].book.in_force
    assert roster is not None
    assert roster.peers() == ROSTER.peers() | {NEW}
    assert council.here[LEAD].book.in_force == ROSTER


def test_a_founder_that_is_not_a_member_leads_its_own_turn() -> None:
    hidden = certify(child_of(founding().roster, [member(p, reduces=p == A) for p in ids(3)]), [BOOT])
    council = Council(hidden, BOOT, NEW)
    council.declare(NEW, B, NOW, cycle=1)
    council.is_lost = lambda sender, to, message: A in (sender, to)
    for turn in range(LEAD_TURNS - 1):
        council.tick(NOW + turn * TURN_SECONDS)
    roster = council.here[B].book.in_force
    assert roster is not None
    assert NEW in roster.peers()
    assert council.here[BOOT].book.in_force == roster


def test_a_founder_lists_ready_peers_in_the_cycle_of_the_founding() -> None:
    council = Council(founding(), A, B)
    for peer in (A, B):
        council.declare(peer, BOOT, 2.0, cycle=0)
    council.tick(4.0)
    assert council.in_force() == founding().roster, "not before the last round of the cycle"
    council.tick(ROUND_SECONDS + 0.1)
    assert council.in_force().peers() == {BOOT, A, B}


def test_in_the_voting_round_a_voter_promises_once_in_each_turn() -> None:
    here = member_of_three()
    keep, send = here.tick(NOW)
    assert isinstance(keep, KeepBallots), "on disk before it is said"
    assert isinstance(send, Send)
    assert isinstance(send.message, Promised)
    assert send.to == LEAD
    said = send.message.promise
    assert (said.voter, said.ballot, said.parent, said.voted) == (OTHER, BALLOT, ROSTER.digest(), None)
    assert verify(OTHER, said.statement(), said.signature)
    assert here.votes.promised_round() == VOTING
    assert here.tick(NOW + 0.1) == []
    assert here.tick(NOW + TURN_SECONDS)


@pytest.mark.parametrize("now", [-5.0, 0.1, ROUND_SECONDS + 0.1, 2 * ROUND_SECONDS + 0.1, 4 * ROUND_SECONDS + 0.1])
def test_no_peer_promises_unasked_in_any_other_round(now: float) -> None:
    here = member_of_three()
    assert here.tick(now) == []
    assert here.votes.promised_round() == -1


def test_a_peer_without_a_roster_or_a_vote_promises_nothing() -> None:
    assert membership_of(A).tick(NOW) == []
    fresh = certify(child_of(founding().roster, [*ROSTER.members, member(D, counts=False)]), [BOOT])
    for peer in (D, NEW):
        assert membership_of(peer, founding(), fresh).tick(NOW) == []


@pytest.mark.parametrize(
    "word",
    [
        promised(OTHER, parent=child_of(ROSTER, ROSTER.members)),
        promised(OTHER, ballot=0),
        promised(OTHER, ballot=ballot_number(VOTING + 9, 0)),
        promised(OTHER, ballot=next(ballot_number(VOTING, n) for n in range(4) if leader(turn=n) != LEAD)),
        promised(OTHER, degraded=True, ballot=next(
            ballot_number(VOTING, n) for n in range(4) if leader(turn=n, degraded=True) == LEAD
        )),
    ],
    ids=["of another roster", "of no round", "far from now", "of another leader", "degraded, while nobody is stalled"],
)  # fmt: skip
def test_unrelated_promises_are_dropped(word: Promised) -> None:
    assert member_of_three(LEAD).balloting.take_promise(OTHER, word, NOW) == []


def test_a_promise_that_no_honest_voter_makes_is_reported() -> None:
    (report,) = member_of_three(LEAD).balloting.take_promise(THIRD, promised(OTHER), NOW)
    assert isinstance(report, Report)
    assert report.topic == "promise-refused"
    assert "handed in a promise of" in report.text


def test_a_leader_learns_declarations_from_promises() -> None:
    lead = member_of_three(LEAD)
    assert lead.balloting.take_promise(OTHER, promised(OTHER, applicant()), NOW) == []
    assert lead.declarations.newest[NEW] == applicant()
    lead.balloting.take_promise(OTHER, promised(OTHER, declaration(D, cycle=9), ballot=BALLOT), NOW)
    assert D not in lead.declarations.newest, "of a cycle to come"


def test_a_member_votes_for_a_proposal_that_follows_from_the_promises_shown() -> None:
    here = member_of_three()
    keep, send = here.balloting.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(keep, KeepBallots), "on disk before it is said"
    assert isinstance(send, Send)
    assert isinstance(send.message, Vote)
    assert (send.to, send.message.roster, send.message.ballot) == (LEAD, proposal().roster.digest(), BALLOT)
    assert here.balloting.take_proposal(LEAD, proposal(), NOW) == [keep, send], "again, the same"


def test_no_peer_votes_for_two_rosters_in_one_ballot() -> None:
    here = member_of_three()
    here.balloting.take_proposal(LEAD, proposal(), NOW)
    another = proposal(promise_of(LEAD, declaration(D, cycle=1)), promise_of(OTHER))
    assert here.balloting.take_proposal(LEAD, another, NOW) == []


AT_LEAST = [
    ("of another roster", proposal(roster=child_of(child_of(ROSTER, ROSTER.members), ROSTER.members)), LEAD, NOW),
    ("of another leader", proposal(), THIRD, NOW),
    ("of no round", proposal(ballot=0), LEAD, NOW),
    ("far from now", proposal(ballot=1 << 60), LEAD, NOW),
    ("of a round long over", proposal(), LEAD, NOW + 5 * ROUND_SECONDS),
]


@pytest.mark.parametrize(
    ("asked", "sender", "now"), [case[1:] for case in AT_LEAST], ids=[case[0] for case in AT_LEAST]
)
def test_a_proposal_that_must_not_be_certified_gets_no_vote(asked: Proposal, sender: PeerId, now: float) -> None:
    assert member_of_three().balloting.take_proposal(sender, asked, now) == []


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (proposal(roster=child_of(ROSTER, (), cycle=1)), "has no members"),
        (proposal(roster=child_of(ROSTER, ROSTER.members[:2], cycle=1)), "does not follow from the promises"),
        (proposal(promises=(promise_of(LEAD, applicant()),)), "shows 1 promises, which are not enough"),
    ],
)
def test_a_proposal_that_does_not_follow_is_reported_with_its_leader(asked: Proposal, text: str) -> None:
    (report,) = member_of_three().balloting.take_proposal(LEAD, asked, NOW)
    assert isinstance(report, Report)
    assert report.topic == "proposal-refused"
    assert short_peer_id(LEAD) in report.text
    assert text in report.text


def test_a_peer_without_a_vote_does_not_vote() -> None:
    assert member_of_three(remembers=False, incarnation=2).balloting.take_proposal(LEAD, proposal(), NOW) == []
    assert membership_of(NEW, founding(), roster_1(3)).balloting.take_proposal(LEAD, proposal(), NOW) == []
    assert membership_of(A).balloting.take_proposal(LEAD, proposal(), NOW) == []


def test_an_unrelated_vote_changes_nothing() -> None:
    lead = member_of_three(LEAD)
    lead.balloting.take_promise(LEAD, promised(LEAD), NOW)
    word = Vote(parent=ROSTER.digest(), roster=ROSTER.digest(), ballot=BALLOT, signature=NO_SIGNATURE)
    assert lead.balloting.take_vote(OTHER, word, NOW) == []
    assert member_of_three(LEAD).balloting.take_vote(OTHER, word, NOW) == []


def test_no_voter_votes_for_a_peer_that_the_manifest_does_not_list() -> None:
    here = member_of_three(listed=frozenset({A, B, C}))
    (report,) = here.balloting.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(report, Report)
    assert "does not list" in report.text


def without_certificate(council: Council) -> None:
    """Let all vote for a newcomer, and let only the leader learn that it was certified."""
    council.declare(NEW, OTHER, NOW, cycle=1)
    council.is_lost = lambda sender, to, message: isinstance(message, RosterReply)
    council.tick(NOW)
    assert council.here[LEAD].book.in_force != ROSTER
    assert council.here[OTHER].book.in_force == ROSTER


def test_a_peer_that_promises_for_a_roster_with_a_child_receives_the_certificate() -> None:
    council = Council(roster_1(3), NEW)
    without_certificate(council)
    council.is_lost = lambda sender, to, message: False
    for turn in range(1, LEAD_TURNS + 1):
        council.tick(NOW + turn * TURN_SECONDS)
    assert council.in_force().peers() == ROSTER.peers() | {NEW}


def test_a_vote_takes_effect_even_if_the_leader_with_the_certificate_is_dead() -> None:
    council = Council(roster_1(3), NEW)
    without_certificate(council)
    dead = council.here.pop(LEAD)
    council.is_lost = lambda sender, to, message: False
    for turn in range(1, 3 * LEAD_TURNS):
        council.tick(NOW + turn * TURN_SECONDS)
    lost = dead.book.in_force
    assert lost is not None
    assert council.here[NEW].book.chain()[2].roster == lost, "the very roster, with another certificate"
    assert council.in_force().peers() == lost.peers() - {LEAD}, "and then one without the leader"


def test_a_certificate_is_sent_only_to_members_that_lack_it() -> None:
    here = member_of_three(LEAD)
    child = certify(child_of(ROSTER, ROSTER.members, cycle=1), ids(3), BALLOT)
    here.rosters.take((child,), NOW)
    (told,) = here.balloting.take_promise(OTHER, promised(OTHER), NOW)
    assert isinstance(told, Send)
    assert (told.to, told.message) == (OTHER, RosterReply(rosters=(child,)))
    assert here.balloting.take_promise(NEW, promised(NEW), NOW) == []
    assert here.balloting.take_promise(OTHER, promised(OTHER, parent=child_of(ROSTER, ())), NOW) == []


def prepare(round_index: int = AFTER, turn: int = 0, **changes: object) -> Prepare:
    word = Prepare(parent=ROSTER.digest(), degraded=False, ballot=ballot_number(round_index, turn))
    return replace(word, **changes)  # type: ignore[arg-type]


def test_a_leader_that_asks_in_its_turn_gets_promises_even_if_no_vote_is_due() -> None:
    here = member_of_three(NOT_AFTER_LEAD)
    (send,) = sent(here.balloting.take_prepare(AFTER_LEAD, prepare(), AFTER_BEGIN), Promised)
    assert send.to == AFTER_LEAD
    assert here.balloting.take_prepare(AFTER_LEAD, prepare(), AFTER_BEGIN) == [], "once"


@pytest.mark.parametrize(
    ("sender", "word"),
    [
        (NOT_AFTER_LEAD, prepare()),
        (AFTER_LEAD, prepare(parent=ZERO_DIGEST)),
        (AFTER_LEAD, prepare(degraded=True)),
        (leader(AFTER, 2), prepare(turn=2)),
        (leader(AFTER + 1), prepare(AFTER + 1)),
        (leader(AFTER - 2), prepare(AFTER - 2)),
    ],
    ids=["not the leader", "of another roster", "degraded", "two turns ahead", "a round ahead", "two rounds ago"],
)
def test_a_request_for_a_promise_out_of_turn_is_ignored(sender: PeerId, word: Prepare) -> None:
    here = member_of_three(NOT_AFTER_LEAD)
    assert here.balloting.take_prepare(sender, word, AFTER_BEGIN) == []
    assert membership_of(A).balloting.take_prepare(sender, word, AFTER_BEGIN) == []


def test_a_promise_is_given_if_the_leaders_clock_is_slightly_ahead() -> None:
    peer = next(peer for peer in ids(3) if peer != leader(AFTER, 1))
    assert member_of_three(peer).balloting.take_prepare(leader(AFTER, 1), prepare(turn=1), AFTER_BEGIN)


def test_a_certificate_goes_to_voters_row_column_and_all_heard_peers() -> None:
    crowd = [member(peer_id(f"m{n}"), counts=n < 3) for n in range(24)]
    roster = certify(child_of(founding().roster, crowd), [BOOT])
    grid = fold_roster(roster.roster, 3)
    me = next(peer for peer in grid.rows[1] if peer not in roster.roster.voters)
    here = membership_of(me, founding(), roster, group_size=3)
    here.liveness.take(heartbeat(NEW), NOW)
    child = certify(child_of(roster.roster, crowd), roster.roster.voters)
    sends = here.balloting.spread(child, roster.roster, NOW)
    to = {send.to for send in sends if isinstance(send, Send) and send.message == RosterReply(rosters=(child,))}
    assert to == (roster.roster.voters | grid.neighbours(me) | {NEW}) - {me}
    assert len(to) == len(sends) < 24
