"""One member's part in certifying rosters: what it has seen, what it promises and votes for, what it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from fake_run import CYCLE_SECONDS, ROUND_SECONDS, ballot_number, peer_id, run_rules, sign_as, verify
from made import (
    NO_SIGNATURE,
    certify,
    child_of,
    declaration,
    founding,
    heartbeat,
    ids,
    member,
    membership_of,
    proof_of,
    roster_1,
    roster_of,
)

from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepBallots, KeepRoster, Report, Send
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.membership import membership as module
from p2p_diloco.protocol.membership.membership import LEAVE_SECONDS, MOST_FORWARDED, Membership
from p2p_diloco.protocol.membership.proposal import next_roster
from p2p_diloco.protocol.wire.ballot import (
    MOST_DECLARATION_BYTES,
    MOST_DECLARATIONS,
    Prepare,
    Promise,
    Promised,
    Proposal,
    View,
    Vote,
    declarations_bytes,
)
from p2p_diloco.protocol.wire.entry import places_in
from p2p_diloco.protocol.wire.grid import fold_roster
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import RosterReply, RosterRequest
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, lead_order

A, B, C, D, E = ids(5)
BOOT, NEW = peer_id("boot"), peer_id("new")
ROSTER = roster_1(3).roster
VOTING = 3
"""The last round of cycle 1, the first cycle in which roster 1 can be followed."""
BEGIN = VOTING * ROUND_SECONDS
NOW = BEGIN + 0.1
TURN_SECONDS = run_rules().clock.turn_seconds
BALLOT = ballot_number(VOTING, 0)


def leader(round_index: int = VOTING, turn: int = 0, roster: Roster = ROSTER, *, degraded: bool = False) -> PeerId:
    return lead_order(roster, round_index, BOOT, degraded=degraded)[turn]


LEAD = leader()
OTHER, THIRD = sorted(set(ids(3)) - {LEAD})


def member_of_three(peer: PeerId = OTHER, **changes: object) -> Membership:
    here = membership_of(peer, founding(), roster_1(3), **changes)  # type: ignore[arg-type]
    here.ready = True
    return here


def sent(actions: Iterable[Action], kind: type) -> list[Send]:
    return [action for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def topics(actions: Iterable[Action]) -> list[str]:
    return [action.topic for action in actions if isinstance(action, Report)]


class Council:
    """Members that exchange messages at once: each message arrives unless it is lost."""

    def __init__(self, certified: CertifiedRoster, *others: PeerId) -> None:
        roster = certified.roster
        self.here = {
            peer: membership_of(peer, founding(), certified, trains=peer != BOOT)
            for peer in (*sorted(roster.peers()), *others)
        }
        self.is_lost: Callable[[PeerId, PeerId, object], bool] = lambda sender, to, message: False
        self.sequence = 0
        self.actions: list[tuple[PeerId, Action]] = []
        for one in self.here.values():
            one.ready = True

    def tick(self, now: float) -> list[Action]:
        """Let all members hear each other and act; return all their actions, including those that follow."""
        self.sequence += 1
        before = len(self.actions)
        for peer, one in self.here.items():
            for other in self.here.keys() - {peer}:
                one.take_heartbeat(heartbeat(other, sequence=self.sequence, trains=other != BOOT), now)
        for peer, one in self.here.items():
            self.do(peer, one.tick(now), now)
        return [action for _, action in self.actions[before:]]

    def do(self, peer: PeerId, actions: Iterable[Action], now: float) -> None:
        """Deliver what a member sends, and what follows from that."""
        for action in actions:
            self.actions.append((peer, action))
            if (
                isinstance(action, Send)
                and action.to in self.here
                and not self.is_lost(peer, action.to, action.message)
            ):
                self.do(action.to, self._taken(self.here[action.to], peer, action.message, now), now)

    def _taken(self, one: Membership, sender: PeerId, message: object, now: float) -> list[Action]:
        match message:
            case Promised():
                return one.take_promise(sender, message, now)
            case Proposal():
                return one.take_proposal(sender, message, now)
            case Vote():
                return one.take_vote(sender, message, now)
            case Prepare():
                return one.take_prepare(sender, message, now)
            case RosterReply():
                return one.take_rosters(message.rosters, now)
            case Declaration():
                return one.pass_on(message, sender, now)
        raise AssertionError(f"members do not send each other {message!r}")

    def declare(self, peer: PeerId, to: PeerId, now: float, **changes: object) -> None:
        """Deliver a peer's declaration to a member."""
        self.do(peer, self.here[to].pass_on(declaration(peer, **changes), peer, now), now)

    def in_force(self) -> Roster:
        """Return the roster in force at all members."""
        (roster,) = {one.book.in_force for one in self.here.values()}
        assert roster is not None
        return roster


def applicant(cycle: int = 1, **changes: object) -> Declaration:
    return declaration(NEW, cycle=cycle, **changes)


# -- a ballot as it should be


def test_a_declaration_known_to_one_voter_is_in_the_certified_roster() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, C, NOW, cycle=1)
    actions = council.tick(NOW)
    assert council.in_force().peers() == ROSTER.peers() | {NEW}
    assert council.in_force().k == 2
    assert sum(isinstance(action, KeepRoster) for action in actions) == 4, "all keep it, the newcomer too"
    assert {action.to for action in sent(actions, Proposal)} == {OTHER, THIRD}
    for one in council.here.values():
        assert one.in_force_since == VOTING


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


# -- promises


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
    assert here.promised_round() == VOTING
    assert here.tick(NOW + 0.1) == []
    assert here.tick(NOW + TURN_SECONDS)


@pytest.mark.parametrize("now", [-5.0, 0.1, ROUND_SECONDS + 0.1, 2 * ROUND_SECONDS + 0.1, 4 * ROUND_SECONDS + 0.1])
def test_no_peer_promises_unasked_in_any_other_round(now: float) -> None:
    here = member_of_three()
    assert here.tick(now) == []
    assert here.promised_round() == -1


def test_a_peer_without_a_roster_or_a_vote_promises_nothing() -> None:
    assert membership_of(A).tick(NOW) == []
    fresh = certify(child_of(founding().roster, [*ROSTER.members, member(D, counts=False)]), [BOOT])
    for peer in (D, NEW):
        assert membership_of(peer, founding(), fresh).tick(NOW) == []


def test_a_peer_that_lost_its_memory_does_not_vote_before_its_incarnation_is_listed() -> None:
    for remembers, incarnation, votes in ((False, 2, False), (True, 2, True), (False, 1, True)):
        here = member_of_three(remembers=remembers, incarnation=incarnation)
        assert bool(sent(here.tick(NOW), Promised)) is votes


def promise_of(peer: PeerId, *declared: Declaration, parent: Roster = ROSTER, **changes: object) -> Promise:
    bitmap = bytes((len(parent.members) + 7) // 8)
    seen = View(absent=bitmap, heard=bitmap, counting=bitmap, idle=bitmap, height=0, declarations=declared)
    word = Promise(
        parent=parent.digest(),
        degraded=False,
        ballot=BALLOT,
        voted=None,
        view=seen,
        voter=peer,
        signature=NO_SIGNATURE,
    )
    word = replace(word, **changes)  # type: ignore[arg-type]
    return replace(word, signature=sign_as(peer, word.statement()))


def promised(peer: PeerId, *declared: Declaration, voted: Proposal | None = None, **changes: object) -> Promised:
    named = (voted.ballot, voted.roster.digest()) if voted is not None else None
    word = promise_of(peer, *declared, voted=named, **changes)  # type: ignore[arg-type]
    return Promised(promise=word, voted=voted)


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
    assert member_of_three(LEAD).take_promise(OTHER, word, NOW) == []


def test_a_promise_that_no_honest_voter_makes_is_reported() -> None:
    (report,) = member_of_three(LEAD).take_promise(THIRD, promised(OTHER), NOW)
    assert isinstance(report, Report)
    assert report.topic == "promise-refused"
    assert "handed in a promise of" in report.text


def test_a_leader_learns_declarations_from_promises() -> None:
    lead = member_of_three(LEAD)
    assert lead.take_promise(OTHER, promised(OTHER, applicant()), NOW) == []
    assert lead.declared[NEW] == applicant()
    lead.take_promise(OTHER, promised(OTHER, declaration(D, cycle=9), ballot=BALLOT), NOW)
    assert D not in lead.declared, "of a cycle to come"


# -- proposals and votes


def proposal(*promises: Promise, **changes: object) -> Proposal:
    """The proposal that follows from all promises, one of which shows an application; the promises may be changed."""
    promises = promises or (promise_of(LEAD, applicant()), promise_of(OTHER))
    roster = next_roster(ROSTER, promises, run_rules(), BOOT, before=None, degraded=False)
    assert roster is not None
    return replace(
        Proposal(ballot=promises[0].ballot, roster=roster, promises=promises, origin=()),
        **changes,  # type: ignore[arg-type]
    )


def test_a_member_votes_for_a_proposal_that_follows_from_the_promises_shown() -> None:
    here = member_of_three()
    keep, send = here.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(keep, KeepBallots), "on disk before it is said"
    assert isinstance(send, Send)
    assert isinstance(send.message, Vote)
    assert (send.to, send.message.roster, send.message.ballot) == (LEAD, proposal().roster.digest(), BALLOT)
    assert here.take_proposal(LEAD, proposal(), NOW) == [keep, send], "again, the same"


def test_no_peer_votes_for_two_rosters_in_one_ballot() -> None:
    here = member_of_three()
    here.take_proposal(LEAD, proposal(), NOW)
    another = proposal(promise_of(LEAD, declaration(D, cycle=1)), promise_of(OTHER))
    assert here.take_proposal(LEAD, another, NOW) == []


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
    assert member_of_three().take_proposal(sender, asked, now) == []


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (proposal(roster=child_of(ROSTER, (), cycle=1)), "has no members"),
        (proposal(roster=child_of(ROSTER, ROSTER.members[:2], cycle=1)), "does not follow from the promises"),
        (proposal(promises=(promise_of(LEAD, applicant()),)), "shows 1 promises, which are not enough"),
    ],
)
def test_a_proposal_that_does_not_follow_is_reported_with_its_leader(asked: Proposal, text: str) -> None:
    (report,) = member_of_three().take_proposal(LEAD, asked, NOW)
    assert isinstance(report, Report)
    assert report.topic == "proposal-refused"
    assert short_peer_id(LEAD) in report.text
    assert text in report.text


def test_a_peer_without_a_vote_does_not_vote() -> None:
    assert member_of_three(remembers=False, incarnation=2).take_proposal(LEAD, proposal(), NOW) == []
    assert membership_of(NEW, founding(), roster_1(3)).take_proposal(LEAD, proposal(), NOW) == []
    assert membership_of(A).take_proposal(LEAD, proposal(), NOW) == []


def test_an_unrelated_vote_changes_nothing() -> None:
    lead = member_of_three(LEAD)
    lead.take_promise(LEAD, promised(LEAD), NOW)
    word = Vote(parent=ROSTER.digest(), roster=ROSTER.digest(), ballot=BALLOT, signature=NO_SIGNATURE)
    assert lead.take_vote(OTHER, word, NOW) == []
    assert member_of_three(LEAD).take_vote(OTHER, word, NOW) == []


def test_no_voter_votes_for_a_peer_that_the_manifest_does_not_list() -> None:
    here = member_of_three()
    here.rules = replace(here.rules, listed=frozenset({A, B, C}))
    (report,) = here.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(report, Report)
    assert "does not list" in report.text


# -- no round goes under two rosters


def test_a_voter_names_no_parent_under_the_old_roster_in_later_rounds() -> None:
    here, digest = member_of_three(), ROSTER.digest()
    assert here.may_name_parents(digest, VOTING + 9)
    here.take_proposal(LEAD, proposal(), NOW)
    assert here.may_name_parents(digest, VOTING), "should it be certified, it governs the next round"
    assert not here.may_name_parents(digest, VOTING + 1)
    assert here.may_name_parents(proposal().roster.digest(), VOTING + 1)


def test_a_later_vote_does_not_let_a_member_name_parents_again() -> None:
    council = Council(roster_1(3), NEW)
    council.declare(NEW, OTHER, NOW, cycle=1)
    council.is_lost = lambda sender, to, message: isinstance(message, Vote)
    for turn in range(6):
        council.tick(NOW + turn * TURN_SECONDS)
    here = council.here[OTHER]
    assert here.promised_round() == VOTING + 1
    assert not here.may_name_parents(ROSTER.digest(), VOTING + 1), "the first vote may have been enough"


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
    assert not here.may_name_parents(child.digest(), VOTING + 2)
    assert here.may_name_parents(ROSTER.digest(), VOTING)
    assert not here.may_name_parents(ROSTER.digest(), VOTING + 1)


def test_no_peer_votes_in_a_ballot_before_the_last_round_in_which_it_named_parents() -> None:
    """Certified in that ballot, the child would govern a round in which this peer named parents under its parent."""
    here = member_of_three()
    here.named_round = VOTING + 1
    assert here.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS) == []
    here.named_round = VOTING
    assert here.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS)


# -- certificates that are lost


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
    here.take_rosters((child,), NOW)
    (told,) = here.take_promise(OTHER, promised(OTHER), NOW)
    assert isinstance(told, Send)
    assert (told.to, told.message) == (OTHER, RosterReply(rosters=(child,)))
    assert here.take_promise(NEW, promised(NEW), NOW) == []
    assert here.take_promise(OTHER, promised(OTHER, parent=child_of(ROSTER, ())), NOW) == []


AFTER = VOTING + 1
AFTER_BEGIN = AFTER * ROUND_SECONDS
AFTER_LEAD = leader(AFTER)
NOT_AFTER_LEAD = next(peer for peer in ids(3) if peer != AFTER_LEAD)


def prepare(round_index: int = AFTER, turn: int = 0, **changes: object) -> Prepare:
    word = Prepare(parent=ROSTER.digest(), degraded=False, ballot=ballot_number(round_index, turn))
    return replace(word, **changes)  # type: ignore[arg-type]


def test_a_leader_that_asks_in_its_turn_gets_promises_even_if_no_vote_is_due() -> None:
    here = member_of_three(NOT_AFTER_LEAD)
    (send,) = sent(here.take_prepare(AFTER_LEAD, prepare(), AFTER_BEGIN), Promised)
    assert send.to == AFTER_LEAD
    assert here.take_prepare(AFTER_LEAD, prepare(), AFTER_BEGIN) == [], "once"


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
    assert here.take_prepare(sender, word, AFTER_BEGIN) == []
    assert membership_of(A).take_prepare(sender, word, AFTER_BEGIN) == []


def test_a_promise_is_given_if_the_leaders_clock_is_slightly_ahead() -> None:
    peer = next(peer for peer in ids(3) if peer != leader(AFTER, 1))
    assert member_of_three(peer).take_prepare(leader(AFTER, 1), prepare(turn=1), AFTER_BEGIN)


# -- leaving


def test_a_declared_leaving_calls_a_ballot_at_once_in_which_the_leaver_votes() -> None:
    council = Council(roster_1(3))
    now = AFTER_BEGIN + 0.1
    council.tick(now)
    leaver = council.here[OTHER]
    word = leaver.leave(now)
    assert word.leaving
    assert verify(OTHER, word.statement(), word.signature)
    assert not leaver.ready
    assert not leaver.may_name_parents(ROSTER.digest(), AFTER)
    assert not leaver.may_go(now)
    for peer in sorted(ROSTER.voters - {OTHER}):
        council.do(OTHER, [Send(to=peer, message=word, deadline=now + 9)], now)
    assert "good-bye" in topics(action for _, action in council.actions)
    for turn in range(LEAD_TURNS):
        council.tick(now + turn * TURN_SECONDS)
    assert council.in_force().peers() == ROSTER.peers() - {OTHER}
    assert not leaver.may_go(now), "the round in progress is under the roster that lists it"
    assert leaver.may_go(now + ROUND_SECONDS), "it is listed no more"


def test_a_leaving_peer_waits_for_eight_seconds_at_most() -> None:
    here = member_of_three()
    here.leave(NOW)
    assert not here.may_go(NOW + LEAVE_SECONDS - 0.1)
    assert here.may_go(NOW + LEAVE_SECONDS)
    assert membership_of(A).may_go(NOW)
    assert membership_of(NEW, founding(), roster_1(3)).may_go(NOW)


def test_a_leaving_peer_repeats_its_declaration_while_it_is_listed() -> None:
    here = member_of_three()
    assert here.declaration(NOW) is None, "there is nothing to say"
    here.leave(NOW)
    word = here.declaration(NOW)
    assert word is not None
    assert word.leaving


# -- declarations


def test_a_voter_forwards_a_declaration_only_once() -> None:
    here = member_of_three()
    assert {send.to for send in sent(here.pass_on(applicant(), NEW, NOW), Declaration)} == {LEAD, THIRD}
    assert here.pass_on(applicant(), NEW, NOW) == []
    assert here.pass_on(declaration(D, cycle=1), LEAD, NOW) == [], "it was passed on already"
    assert here.declared[D] == declaration(D, cycle=1)
    assert membership_of(A).pass_on(applicant(), NEW, NOW) == []


def test_ever_later_incarnations_of_a_peer_are_forwarded_once_in_a_cycle() -> None:
    here = member_of_three()
    cycle = here.rules.clock.cycle(here.rules.clock.round_at(NOW))
    sent_for = [
        len(sent(here.pass_on(applicant(incarnation=number, cycle=cycle), NEW, NOW), Declaration))
        for number in range(1, 100)
    ]
    assert sent_for == [2, *[0] * 98]
    assert here.declared[NEW].incarnation == 99, "it is noted, and shown in this peer's own promise"
    later = NOW + CYCLE_SECONDS
    assert sent(here.pass_on(applicant(incarnation=100, cycle=cycle + 1), NEW, later), Declaration)


def test_of_a_crowd_of_applicants_few_are_forwarded_in_a_cycle_and_members_always() -> None:
    here = member_of_three()
    cycle = here.rules.clock.cycle(here.rules.clock.round_at(NOW))
    crowd = [peer_id(f"sybil {number}") for number in range(3 * MOST_FORWARDED)]
    forwarded = [peer for peer in crowd if here.pass_on(declaration(peer, cycle=cycle), peer, NOW)]
    assert forwarded == crowd[:MOST_FORWARDED]
    assert sent(here.pass_on(declaration(LEAD, incarnation=9, cycle=cycle), LEAD, NOW), Declaration)


@pytest.mark.parametrize(
    ("sender", "is_taken"),
    [(LEAD, True), (peer_id("boot"), True), (peer_id("mallory"), False)],
    ids=["member", "founder", "stranger"],
)
def test_forwarded_declarations_are_accepted_only_from_members_and_the_founder(sender: PeerId, is_taken: bool) -> None:
    here = membership_of(A)
    here.take_rosters((founding(), roster_1(3)), NOW)
    here.pass_on(applicant(), sender, NOW)
    assert (NEW in here.declared) is is_taken


NEWS: list[tuple[str, Declaration, bool]] = [
    ("an application", applicant(cycle=3), True),
    ("an application of two cycles ago", applicant(), True),
    ("an old application", applicant(cycle=0), False),
    ("a good-bye of a stranger", applicant(leaving=True), False),
    ("a member as it is", declaration(A, incarnation=2, cycle=3), False),
    ("a member that leaves", declaration(A, incarnation=2, leaving=True), True),
    ("another incarnation", declaration(A, incarnation=3, cycle=1), True),
    ("another incarnation, three cycles ago", declaration(A, incarnation=3, cycle=0), False),
    ("an earlier incarnation", declaration(A, incarnation=1, leaving=True), False),
    ("a member that cannot be reached any more", declaration(A, incarnation=2, reachable=False, cycle=3), True),
    ("a small change of share", declaration(A, incarnation=2, share=7, cycle=3), False),
    ("a change of share", declaration(A, incarnation=2, share=6, cycle=3), True),
    ("a change of share where it reduces nothing", declaration(B, reachable=False, share=1, cycle=3), False),
    ("one that can be reached now", declaration(B, reachable=True, cycle=3), True),
    ("one that cannot be reached, and says otherwise", declaration(B, proofs=(proof_of(B, B),), cycle=3), False),
    ("one that a fresh identity has proved", declaration(B, proofs=(proof_of(B, NEW),), cycle=3), False),
    ("one that one of three who may prove it has proved", declaration(B, proofs=(proof_of(B, A),), cycle=3), False),
    ("one that two of them have proved", declaration(B, proofs=(proof_of(B, A), proof_of(B, C)), cycle=3), True),
    ("a member that reduces, by its own word", declaration(C, proofs=(proof_of(C, NEW),), cycle=3), False),
    ("the bootstrap, whatever it says of its reach", declaration(BOOT, reachable=False, trains=False, cycle=3), False),
]
MIXED = certify(
    child_of(
        founding().roster,
        [
            member(BOOT, counts=False, trains=False),
            member(A, incarnation=2),
            member(C),
            member(B, reduces=False),
        ],
    ),
    [BOOT],
)


@pytest.mark.parametrize(("word", "is_news"), [case[1:] for case in NEWS], ids=[case[0] for case in NEWS])
def test_a_declaration_that_changes_something_is_forwarded_to_leaders(word: Declaration, is_news: bool) -> None:
    here, now = membership_of(C, founding(), MIXED), 3 * CYCLE_SECONDS + 0.1
    assert bool(sent(here.pass_on(word, word.peer, now), Declaration)) is is_news
    assert (word in here.view(MIXED.roster, now).declarations) is is_news


def test_a_reducer_that_cannot_be_reached_any_more_is_told_before_those_that_wish_to_reduce() -> None:
    """As on a LAN of 16 that a friend outside cannot reach: their claims filled the promises, and five went on."""
    wishing = [peer_id(f"wishing-{number}") for number in range(20)]
    listed = [member(A, incarnation=2), member(C), *(member(peer, reduces=False) for peer in wishing)]
    roster = certify(child_of(founding().roster, [member(BOOT, counts=False, trains=False), *listed]), [BOOT])
    here = membership_of(C, founding(), roster)
    lost = declaration(A, incarnation=2, reachable=False, cycle=3)
    for word in (lost, *(declaration(peer, cycle=3, proofs=(proof_of(peer, BOOT),)) for peer in wishing)):
        assert here.take_declaration(word, 3)
    seen = [here.view(roster.roster, cycle * CYCLE_SECONDS + 0.1).declarations for cycle in (3, 5, 6)]
    assert [words[0] for words in seen[:2]] == [lost, lost]
    assert 1 < len(seen[0]) < 1 + len(wishing), "not all fit"
    assert seen[2] == (), "two cycles later they count no more"


def test_a_peer_that_the_manifest_does_not_list_is_not_news() -> None:
    here = member_of_three()
    here.rules = replace(here.rules, listed=frozenset({A, B, C}))
    assert here.pass_on(applicant(), NEW, NOW) == []


def test_a_peer_declares_itself_while_the_roster_differs_from_its_state() -> None:
    stranger = membership_of(NEW, founding(), roster_1(3))
    assert stranger.declaration(NOW) is None, "it is not ready"
    stranger.ready = True
    word = stranger.declaration(NOW)
    assert word is not None
    assert (word.peer, word.cycle, word.leaving) == (NEW, 1, False)
    again = member_of_three(OTHER, incarnation=2)
    assert again.declaration(NOW) is not None
    assert membership_of(A).declaration(NOW) is None


def test_a_bootstrap_declares_itself_only_while_it_is_needed() -> None:
    few = certify(child_of(founding().roster, map(member, (A, B))), [BOOT])
    for certified, is_needed in ((few, True), (roster_1(3), False)):
        boot = membership_of(BOOT, founding(), certified, trains=False)
        boot.ready = True
        assert boot.is_needed() is is_needed
        assert (boot.declaration(NOW) is not None) is is_needed
    assert not membership_of(BOOT, trains=False).is_needed()
    assert not membership_of(BOOT, founding(), few).is_needed(), "it trains"
    assert not membership_of(NEW, founding(), few, trains=False).is_needed(), "it did not found the run"


def test_a_promise_shows_its_voters_own_declaration_and_leavers_before_applicants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = member_of_three()
    here.can_be_dialled = False
    for n in range(40):
        here.pass_on(declaration(peer_id(f"new {n}"), cycle=1, reachable=n % 4 == 0), A, NOW)
    here.pass_on(declaration(THIRD, leaving=True, cycle=1), A, NOW)
    words = here.view(ROSTER, NOW).declarations
    assert len(words) <= MOST_DECLARATIONS
    assert {word.peer for word in words} >= {OTHER, THIRD}
    strangers = [word for word in words if word.peer not in ROSTER.peers()]
    assert all(word.reachable for word in strangers), "those first that can be reached"
    assert MOST_DECLARATION_BYTES // 4 < declarations_bytes(strangers) <= MOST_DECLARATION_BYTES // 2


def test_applicants_without_proofs_come_after_those_with_proofs() -> None:
    here = member_of_three()
    proved = peer_id("proved")
    for n in range(40):
        peer = peer_id(f"new {n}")
        here.pass_on(declaration(peer, cycle=1, proofs=(proof_of(peer, peer_id("accomplice"), cycle=1),)), A, NOW)
    here.pass_on(declaration(proved, cycle=1), A, NOW)
    assert here.view(ROSTER, NOW).declarations[0].peer == proved


def test_members_that_count_come_before_fresh_ones_with_repeated_declarations() -> None:
    crowd = [peer_id(f"fresh {n}") for n in range(30)]
    many = certify(
        child_of(
            founding().roster,
            [*map(member, (A, B, C)), *(member(peer, counts=False, reduces=False) for peer in crowd)],
        ),
        [BOOT],
    )
    here = membership_of(A, founding(), many)
    for peer in crowd:
        here.pass_on(declaration(peer, cycle=1), peer, NOW)
    here.pass_on(declaration(B, cycle=1, reachable=False), B, NOW)
    words = here.view(many.roster, NOW).declarations
    assert words[0].peer == B
    assert len(words) > 1


def test_half_of_the_declarations_are_reserved_for_applicants_without_claims() -> None:
    here = member_of_three()
    for n in range(40):
        here.pass_on(declaration(peer_id(f"new {n}"), cycle=1, reachable=False), A, NOW)
    assert len(here.view(ROSTER, NOW).declarations) >= MOST_DECLARATIONS // 2 - 2


def test_old_applications_are_dropped_after_a_while() -> None:
    here = member_of_three()
    here.pass_on(applicant(), NEW, NOW)
    for cycle, is_kept in ((3, True), (4, False)):
        here.tick(cycle * CYCLE_SECONDS + 0.1)
        assert (NEW in here.declared) is is_kept


# -- what a voter has seen


def named(bitmap: bytes, roster: Roster = ROSTER) -> set[PeerId]:
    return {roster.members[place].peer for place in places_in(bitmap)}


LISTENED_CYCLES = 6
SEEN = LISTENED_CYCLES * CYCLE_SECONDS + 0.1
LAST_ROUNDS = range(2 * LISTENED_CYCLES - 8, 2 * LISTENED_CYCLES)
"""The rounds of the last four cycles, after which a member that was in none of their entries counts as gone."""


def listen(here: Membership, num_entries: int, present: Iterable[PeerId]) -> None:
    """Let a member listen for six cycles, and have `num_entries` in each of the last four."""
    for now in range(0, int(SEEN), 4):
        here.tick(float(now))
    for first in LAST_ROUNDS[::2]:
        for number in range(num_entries):
            here.note_entry(present, (), first + number % 2)


def seeing(*rosters: CertifiedRoster, num_entries: int = 0, linked: Iterable[PeerId] = ()) -> Membership:
    """A member that has listened, and was the only one present in the entries."""
    here = membership_of(A, founding(), *(rosters or (roster_1(3),)), linked=linked)
    here.ready = True
    listen(here, num_entries, {A})
    return here


def test_if_most_spans_got_entries_a_member_in_none_of_four_cycles_is_absent_even_if_heard() -> None:
    here = seeing(num_entries=3, linked=(B, C))
    here.note_entry({B}, (), LAST_ROUNDS[0])
    here.note_entry({C}, (), LAST_ROUNDS[0] - 1)
    here.take_heartbeat(heartbeat(C), SEEN)
    assert named(here.view(ROSTER, SEEN).absent) == {C}


def test_a_member_whose_link_was_closed_is_absent_after_a_cycle_and_one_with_a_link_is_not() -> None:
    here = seeing(num_entries=3, linked=(B,))
    for peer in (B, C):
        here.note_entry({peer}, (), LAST_ROUNDS[-3])
        here.take_heartbeat(heartbeat(peer), SEEN - CYCLE_SECONDS - 1.0)
    assert named(here.view(ROSTER, SEEN).absent) == {C}
    here.take_heartbeat(heartbeat(C, sequence=2), SEEN - 1.0)
    assert named(here.view(ROSTER, SEEN).absent) == set()


def test_right_after_a_stall_nobody_is_absent_for_having_been_in_no_entry() -> None:
    here = seeing(linked=(B, C))
    for number in range(5):
        here.note_entry({A, B}, (), LAST_ROUNDS[-2] + number % 2)
    here.take_heartbeat(heartbeat(C), SEEN)
    assert named(here.view(ROSTER, SEEN).absent) == set()


def test_if_few_spans_got_entries_a_member_not_heard_for_four_cycles_is_absent() -> None:
    here = seeing(num_entries=1, linked=(B, C))
    here.take_heartbeat(heartbeat(B), SEEN - 4 * CYCLE_SECONDS + 1.0)
    assert named(here.view(ROSTER, SEEN).absent) == {C}
    here.note_entry({C}, (), LAST_ROUNDS[-1])
    assert named(here.view(ROSTER, SEEN).absent) == set()
    assert named(here.view(ROSTER, SEEN + 0.1).heard) == {A}, "a heartbeat counts for eight seconds"


def test_no_member_is_absent_before_it_was_listed_and_this_peer_listened_for_four_cycles() -> None:
    woken = membership_of(A, founding(), roster_1(3), linked=(B, C))
    woken.tick(SEEN - 1.0)
    assert named(woken.view(ROSTER, SEEN).absent) == set()
    here = seeing(num_entries=5, linked=(B, C))
    assert named(here.view(ROSTER, SEEN).absent) == {B, C}
    just = certify(child_of(ROSTER, [*ROSTER.members, member(D, since=2)], cycle=2), ids(3), ballot_number(5, 0))
    here = seeing(roster_1(3), just, num_entries=5, linked=(B, C, D))
    assert named(here.view(just.roster, SEEN).absent, just.roster) == {B, C}


def test_a_peer_that_only_dials_out_misses_no_member_that_it_cannot_hear() -> None:
    hidden = certify(
        child_of(founding().roster, [member(B), member(A, reduces=False), member(C, reduces=False)]), [BOOT]
    )
    here = seeing(hidden, linked=(B,))
    here.can_be_dialled = False
    assert named(here.view(hidden.roster, SEEN).absent, hidden.roster) == {B}


GRID_8 = certify(roster_of(8), [BOOT])


def in_grid(peer: PeerId, num_entries: int, present: Iterable[PeerId] = ()) -> View:
    here = membership_of(peer, founding(), GRID_8, group_size=3, linked=GRID_8.roster.peers())
    listen(here, num_entries, {peer, *present})
    return here.view(GRID_8.roster, SEEN)


def test_in_a_grid_members_of_a_silent_row_are_spared_and_its_reducers_are_not() -> None:
    grid = fold_roster(GRID_8.roster, 3)
    me = grid.rows[0][0]
    silent = grid.rows[1]
    assert len(grid.rows) > 1
    others = [peer for row in grid.rows if row != silent for peer in row]
    missing = named(in_grid(me, 5, others).absent, GRID_8.roster)
    assert missing == set(silent), "all eight reduce by their listing"
    hidden = child_of(
        founding().roster, [replace(m, reduces=place < 6) for place, m in enumerate(GRID_8.roster.members)]
    )
    here = membership_of(A, founding(), certify(hidden, [BOOT]), group_size=3, linked=hidden.peers())
    fold = fold_roster(hidden, 3)
    row = next(row for row in fold.rows if A not in row and not set(row) <= fold.reducers())
    listen(here, 5, hidden.peers() - set(row))
    assert named(here.view(hidden, SEEN).absent, hidden) == set(row) & {m.peer for m in hidden.members if m.reduces}


def test_in_a_grid_without_entries_a_member_misses_only_its_neighbours() -> None:
    grid = fold_roster(GRID_8.roster, 3)
    me = grid.rows[0][0]
    assert named(in_grid(me, 0).absent, GRID_8.roster) == grid.neighbours(me)
    assert grid.neighbours(me) < GRID_8.roster.peers() - {me}


def test_a_view_lists_peers_heard_peers_that_came_to_count_and_the_number_of_entries() -> None:
    fresh = certify(child_of(founding().roster, [member(A), member(B, counts=False), member(C)]), [BOOT])
    here = membership_of(A, founding(), fresh)
    here.height = 77
    for cycle in range(1, 5):
        here.note_entry({A, B, C}, {A, B, C}, 2 * cycle)
    here.take_heartbeat(heartbeat(B), 4 * CYCLE_SECONDS)
    view = here.view(fresh.roster, 4 * CYCLE_SECONDS + 1.0)
    assert named(view.heard, fresh.roster) == {A, B}
    assert named(view.counting, fresh.roster) == {B}, "the others count already"
    assert named(view.idle, fresh.roster) == set()
    assert view.height == 77


def test_an_owner_without_entries_is_reported_as_idle() -> None:
    here = member_of_three(LEAD)
    rules = here.rules
    silent = OTHER
    reports: list[Action] = []
    for round_index in range(1, 1 + 4 * rules.clock.num_fragments):
        fragment = rules.clock.fragment(round_index)
        roster, grid = here.book.folded(ROSTER.digest(), round_index)
        for index in range(rules.num_spans[fragment]):
            if grid.owner(SpanId(fragment, index)) != silent:
                here.owners.entry_absorbed(round_index, SpanId(fragment, index), roster, grid)
        reports += here.round_over(round_index)
    (report,) = reports
    assert isinstance(report, Report)
    assert report.topic == "reducer-lost"
    assert report.text.startswith(f"the spans of {short_peer_id(silent)} got no entries for 2 cycles while others' did")
    assert named(here.view(ROSTER, NOW).idle) == {silent}


def test_an_unready_peer_draws_no_conclusions_from_its_logs() -> None:
    here = membership_of(LEAD, founding(), roster_1(3))
    assert here.round_over(1) == []
    here.ready = True
    assert here.round_over(0) == [], "the round before the first entries"


# -- peers that are heard


def test_clocks_of_voters_count_and_without_voters_those_of_all_members() -> None:
    roster = certify(
        child_of(founding().roster, [member(A), member(B), member(D, counts=False), member(C, reduces=False)]), [BOOT]
    )
    assert roster.roster.voters == {A, B, C}
    here = membership_of(A, founding(), roster)
    assert here.audible_voters() == {B, C}
    assert here.clocks(0.0) == {B, C, D}
    here.can_be_dialled = False
    assert here.audible_voters() == {B}, "two that only dial out never hear each other"
    hidden = certify(child_of(founding().roster, [member(peer, reduces=False) for peer in (A, B)]), [BOOT])
    alone = membership_of(A, founding(), hidden)
    alone.can_be_dialled = False
    assert alone.clocks(0.0) == {BOOT}, "who hears no member agrees with them by the founder"
    fresh = certify(child_of(founding().roster, [member(A), *(member(p, counts=False) for p in (B, C))]), [BOOT])
    assert fresh.roster.voters == {A}
    assert membership_of(A, founding(), fresh).audible_voters() == {B, C}
    assert membership_of(A).audible_voters() == membership_of(A).clocks(0.0) == frozenset()


def hidden_member(peer: PeerId, *members: PeerId) -> Membership:
    """Return a peer that cannot be dialled, under a roster without reducers."""
    roster = certify(child_of(founding().roster, [member(one, reduces=False) for one in members]), [BOOT])
    here = membership_of(peer, founding(), roster)
    here.can_be_dialled = False
    return here


@pytest.mark.parametrize(
    ("here", "nobody"),
    [(hidden_member(A, A, B), {BOOT}), (hidden_member(BOOT, BOOT, B), set()), (hidden_member(NEW, B), {BOOT})],
    ids=["a member", "the founder", "a joiner"],
)
def test_clocks_of_heard_members_count_if_none_can_be_dialled(here: Membership, nobody: set[PeerId]) -> None:
    assert here.clocks(0.0) == nobody
    here.take_heartbeat(heartbeat(E), 0.0)
    assert here.clocks(0.0) == nobody, "a stranger has no say"
    here.take_heartbeat(heartbeat(B), 0.0)
    assert here.clocks(0.0) == {B}, "the founder may be gone"
    assert here.clocks(here.rules.silence_seconds + 0.1) == nobody


def test_the_founders_clock_counts_until_over_half_of_such_members_are_heard() -> None:
    here, joiner = hidden_member(A, A, B, C, D), hidden_member(NEW, A, B, C, D)
    expected = [
        (B, {BOOT}, {BOOT}),  # one of four may lie, and be the only one heard
        (C, {B, C}, {BOOT}),
        (D, {B, C, D}, {B, C, D}),
    ]
    for heard, of_the_member, of_the_joiner in expected:
        here.take_heartbeat(heartbeat(heard), 0.0)
        joiner.take_heartbeat(heartbeat(heard), 0.0)
        assert here.clocks(0.0) == of_the_member
        assert joiner.clocks(0.0) == of_the_joiner


def test_a_hub_is_the_only_peer_heard_and_can_hear_others() -> None:
    members = [member(A), *(member(peer, reduces=False) for peer in (B, C))]
    roster = certify(child_of(founding().roster, members), [BOOT])
    here = membership_of(B, founding(), roster)
    assert here.hears_hub(frozenset((A,)))
    assert here.hears_hub(frozenset((BOOT,))), "the founder"
    assert not here.hears_hub(frozenset((C,))), "it may hear this peer alone"
    assert not here.hears_hub(frozenset((A, C)))
    assert not membership_of(A, founding(), roster).hears_hub(frozenset((BOOT,))), "it is one itself"
    two = certify(child_of(founding().roster, members[:2]), [BOOT])
    assert not membership_of(B, founding(), two).hears_hub(frozenset((A,))), "there is nobody else to hear"
    assert membership_of(B, founding(), two).hears_hub(frozenset((BOOT,))), "it hears the other one"
    assert not membership_of(B).hears_hub(frozenset((A,)))


def test_a_joiner_uses_the_clocks_of_members_that_it_hears() -> None:
    roster = certify(child_of(founding().roster, [*map(member, (A, B, C)), member(D, counts=False)]), [BOOT])
    here = membership_of(NEW, founding(), roster)
    assert here.clocks(0.0) == {A, B, C, D}
    here.take_heartbeat(heartbeat(D), 0.0)
    assert here.clocks(0.0) == {D}
    here.take_heartbeat(heartbeat(B), 0.0)
    assert here.clocks(0.0) == {B, D}


def test_no_peer_is_heard_in_the_future_after_a_clock_was_far_ahead() -> None:
    here = member_of_three(A)
    here.take_heartbeat(heartbeat(B), 500.0)
    here.set_back(20.0)
    assert (here.heard[B].at, here.heard[B].since) == (20.0, 20.0)
    assert here.alive(20.0 + 9.0) == {}
    here.take_heartbeat(heartbeat(C), 10.0)
    here.set_back(20.0)
    assert here.heard[C].at == 10.0


# -- stalled


@pytest.mark.parametrize(("cycles_without_entries", "expected"), [(0, False), (2, False), (3, True), (10**9, True)])
def test_a_member_is_stalled_after_three_cycles_without_entries(cycles_without_entries: int, expected: bool) -> None:
    here = member_of_three()
    here.cycles_without_entries = cycles_without_entries
    assert here.is_stalled() is expected
    stranger = membership_of(NEW, founding(), roster_1(3))
    stranger.cycles_without_entries = cycles_without_entries
    assert not stranger.is_stalled()
    assert not membership_of(A).is_stalled()


def test_a_lone_member_is_a_majority_however_long_it_has_waited_for_others() -> None:
    here = membership_of(BOOT, founding())
    here.cycles_without_entries = 10**9
    assert not here.is_stalled()


def test_a_bootstrap_is_stalled_only_if_a_trainer_applies() -> None:
    roster = certify(child_of(founding().roster, [member(BOOT, counts=False, trains=False), member(A)]), [BOOT])
    here = membership_of(BOOT, founding(), roster, trains=False)
    here.cycles_without_entries = 3
    for word, is_stalled in (
        (None, False),
        (declaration(A), False),
        (declaration(NEW, trains=False), False),
        (declaration(NEW, leaving=True, incarnation=2), False),
        (declaration(A, incarnation=2), True),
        (declaration(NEW, incarnation=3), True),
    ):
        here.declared = {word.peer: word} if word is not None else {}
        assert here.is_stalled() is is_stalled


STALL = 3 * CYCLE_SECONDS


def stalled(council: Council, *gone: PeerId) -> None:
    for peer in gone:
        del council.here[peer]
    for one in council.here.values():
        one.cycles_without_entries = 3


def test_a_quarter_of_a_stalled_run_continues_with_exactly_the_peers_present() -> None:
    council = Council(roster_1(5))
    stalled(council, C, D, E)
    for turn in range(6 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    roster = council.in_force()
    assert roster.peers() == {A, B}
    assert roster.degraded
    assert all(one.cycles_without_entries == 0 for one in council.here.values())


def test_members_that_reach_only_a_founder_outside_the_roster_continue_together() -> None:
    council = Council(roster_1(5), BOOT)
    council.is_lost = lambda sender, to, message: BOOT not in (sender, to)
    stalled(council, C, D, E)
    council.here[BOOT].cycles_without_entries = 0
    for turn in range(6 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.here[A].book.in_force == council.here[B].book.in_force
    assert {member.peer for member in council.here[A].book.in_force.members if member.trains} == {A, B}


def test_less_than_a_quarter_waits_until_it_has_been_stalled_for_four_times_as_long() -> None:
    council = Council(roster_1(5))
    stalled(council, B, C, D, E)
    for turn in range(2 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force() == roster_of(5)
    council.here[A].cycles_without_entries = 12
    for turn in range(2 * LEAD_TURNS, 8 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force().peers() == {A}


def test_only_stalled_peers_vote_for_a_degraded_child() -> None:
    council = Council(roster_1(5))
    stalled(council, C, D, E)
    council.here[B].cycles_without_entries = 0
    for turn in range(4 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force() == roster_of(5)
    assert not any(isinstance(action, Send) and isinstance(action.message, Vote) for _, action in council.actions)


def test_voters_that_are_present_and_make_no_steps_are_idle() -> None:
    here = member_of_three(A)

    def heard(now: float, sequence: int, **steps: int) -> None:
        for peer, name in ((B, "b"), (C, "c")):
            if name in steps:
                here.take_heartbeat(heartbeat(peer, sequence=sequence, steps=steps[name]), now)

    heard(1.0, 1, b=0, c=0)
    assert here.are_voters_idle(1.0)
    heard(2.0, 2, b=5, c=0)
    assert not here.are_voters_idle(2.0), "one of them goes on"
    heard(3.0, 3, b=5, c=0)
    assert here.are_voters_idle(3.0)
    here.own_steps = 1
    assert not here.are_voters_idle(3.0)
    assert not here.are_voters_idle(99.0), "who is not here is not idle"
    assert not membership_of(A).are_voters_idle(0.0)


# -- the chain of rosters


def test_an_invalid_roster_is_reported_once_and_ends_the_list() -> None:
    here = membership_of(A, founding(), roster_1(3))
    child = child_of(ROSTER, ROSTER.members)
    (report,) = here.take_rosters((certify(child, []), certify(child, [A, B])), 0.0)
    assert isinstance(report, Report)
    assert report.topic == "roster-refused"
    assert here.take_rosters((certify(child, []),), 0.0) == []
    assert here.book.in_force == ROSTER


@pytest.mark.parametrize("known", [(), (founding(),)], ids=["a joiner", "a member that was away"])
def test_a_roster_that_arrives_before_its_parent_is_left_out_and_its_sender_not_blamed(
    known: tuple[CertifiedRoster, ...],
) -> None:
    here = membership_of(A, *known)
    newest = certify(child_of(ROSTER, ROSTER.members), [A, B])
    assert here.take_rosters((newest,), 0.0) == []
    assert newest.roster.digest() not in here.book
    here.take_rosters((founding(), roster_1(3), newest), 0.0)
    assert here.book.in_force == newest.roster


def test_an_own_vote_that_is_not_on_disk_is_reported_once() -> None:
    """This means a restored backup, or a copy that runs elsewhere: nothing else tells the user."""
    first = roster_1(3)
    second = certify(child_of(first.roster, first.roster.members), [A, B], ballot=BALLOT)
    third = certify(child_of(second.roster, second.roster.members), [A, B], ballot=BALLOT + 1)

    def said(here: Membership, *rosters: CertifiedRoster) -> list[str]:
        actions = here.take_rosters(rosters, NOW)
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


def test_a_bounded_number_of_refused_rosters_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REFUSED", 2)
    here = membership_of(A, founding(), roster_1(3))
    unsigned = [certify(child_of(ROSTER, ROSTER.members, height=n), []) for n in range(3)]
    for number in (0, 1, 2):
        assert here.take_rosters((unsigned[number],), 0.0)
    assert not here.take_rosters((unsigned[2],), 0.0)
    assert here.take_rosters((unsigned[0],), 0.0)


def test_a_better_branch_is_announced() -> None:
    alone = certify(child_of(ROSTER, ROSTER.members[:1], degraded=True, cycle=3), [A], ballot_number(6, 0))
    here = membership_of(A, founding(), roster_1(3), alone)
    branch = certify(child_of(ROSTER, ROSTER.members[1:], cycle=2, height=9), [B, C], ballot_number(5, 0))
    actions = here.take_rosters((branch,), 4 * CYCLE_SECONDS)
    assert topics(actions) == ["roster", "branch"]
    assert here.book.in_force == branch.roster
    assert here.is_better(alone, 4) is None, "it is known"
    assert here.is_better(certify(child_of(child_of(ROSTER, ()), ()), [A]), 4) is None, "nobody knows from where"


def roster_sentences(here: Membership, *rosters: CertifiedRoster, now: float = 0.0) -> list[str]:
    return [
        action.text
        for certified in rosters
        for action in here.take_rosters((certified,), now)
        if isinstance(action, Report) and action.topic == "roster"
    ]


def test_a_roster_is_reported_with_joined_and_departed_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NAMED", 2)
    members = roster_of(4).members
    here = membership_of(A, founding())
    said = roster_sentences(here, roster_1(4), certify(child_of(roster_of(4), members[1:]), ids(4)))
    one, two = map(short_peer_id, sorted(ids(4))[:2])
    dropped = "this peer" if members[0].peer == A else short_peer_id(members[0].peer)
    assert said == [
        f"roster 1: 4 members (new: {one}, {two}, 2 more; gone: {short_peer_id(BOOT)})",
        f"roster 2: 3 members (gone: {dropped})",
    ]


def without(peer: PeerId) -> CertifiedRoster:
    return certify(child_of(ROSTER, [m for m in ROSTER.members if m.peer != peer], cycle=1), ids(3), BALLOT)


def test_who_was_too_late_waits_before_its_application_is_shown_and_the_event_says_why() -> None:
    here = seeing()
    here.note_entry({C}, (), 0)
    here.take_heartbeat(heartbeat(C), NOW)
    said = roster_sentences(here, without(C), now=NOW)
    absent = VOTING * ROUND_SECONDS
    assert said == [f"roster 2: 2 members (gone: {short_peer_id(C)}, in no entry for {absent:.0f} s)"]
    parent = without(C).roster
    assert here.take_declaration(declaration(C, cycle=2), 2)
    assert here.view(parent, NOW + 19.0).declarations == ()
    assert [word.peer for word in here.view(parent, NOW + 20.0).declarations] == [C]


@pytest.mark.parametrize("reason", ["left", "its link closed"])
def test_who_left_or_was_killed_does_not_wait(reason: str) -> None:
    here = seeing()
    here.take_heartbeat(heartbeat(C), SEEN - CYCLE_SECONDS - 1.0)
    if reason == "left":
        here.take_declaration(declaration(C, cycle=2, leaving=True), 2)
    assert roster_sentences(here, without(C), now=SEEN) == [f"roster 2: 2 members (gone: {short_peer_id(C)}, {reason})"]
    assert here.returns.wait_seconds(C, 1, SEEN) == 0.0


def test_the_first_roster_that_a_peer_sees_names_its_members() -> None:
    here = membership_of(A)
    assert roster_sentences(here, founding()) == [f"roster 0: 1 member ({short_peer_id(BOOT)})"]


def test_a_roster_of_the_same_members_is_not_reported() -> None:
    here = membership_of(A, founding(), roster_1(3))
    same = child_of(ROSTER, [replace(member, incarnation=9) for member in ROSTER.members])
    assert roster_sentences(here, certify(same, ids(3))) == []
    assert here.book.in_force == same


def test_a_degraded_roster_is_named_as_such() -> None:
    here = member_of_three(A)
    here.cycles_without_entries = 3
    child = certify(child_of(ROSTER, ROSTER.members[:1], degraded=True, cycle=3), [B], ballot_number(6, 0))
    (_, report) = here.take_rosters((child,), STALL)
    assert isinstance(report, Report)
    assert "degraded, certified by fewer than a majority" in report.text


def test_data_about_strangers_is_dropped_when_they_go() -> None:
    here = member_of_three(A)
    here.take_heartbeat(heartbeat(NEW), 0.0)
    here.take_declaration(declaration(NEW), 0)
    here.note_entry({NEW, B}, {NEW, B}, 4)
    here.take_rosters((certify(child_of(ROSTER, ROSTER.members), ids(3)),), 1000.0)
    assert NEW not in here.heard
    assert NEW not in here.declared
    assert here.present_in == {B: 4}


def test_a_certificate_goes_to_voters_row_column_and_all_heard_peers() -> None:
    crowd = [member(peer_id(f"m{n}"), counts=n < 3) for n in range(24)]
    roster = certify(child_of(founding().roster, crowd), [BOOT])
    grid = fold_roster(roster.roster, 3)
    me = next(peer for peer in grid.rows[1] if peer not in roster.roster.voters)
    here = membership_of(me, founding(), roster, group_size=3)
    here.take_heartbeat(heartbeat(NEW), NOW)
    child = certify(child_of(roster.roster, crowd), roster.roster.voters)
    sends = here.spread(child, roster.roster, NOW)
    to = {send.to for send in sends if isinstance(send, Send) and send.message == RosterReply(rosters=(child,))}
    assert to == (roster.roster.voters | grid.neighbours(me) | {NEW}) - {me}
    assert len(to) == len(sends) < 24


def test_a_peer_requests_later_rosters_and_earlier_certificates() -> None:
    here = member_of_three(A)
    ask = here.ask_rosters(B, NOW)
    assert (ask.to, ask.message) == (B, RosterRequest(known=here.book.landmarks()))
    again = here.ask_certificate(B, ROSTER.digest(), NOW)
    assert again.message == RosterRequest(known=(founding().roster.digest(),))


def test_a_joiner_takes_a_roster_of_a_run_whose_clock_is_far_ahead_of_its_own() -> None:
    far = certify(child_of(ROSTER, ROSTER.members), ids(3), ballot_number(10**6, 0))
    for peer, incarnation, is_taken in ((NEW, 1, True), (A, 2, True), (A, 1, False)):
        here = membership_of(peer, founding(), roster_1(3), incarnation=incarnation)
        here.take_rosters((far,), NOW)
        assert (here.book.in_force == far.roster) is is_taken


def test_a_peer_whose_later_start_is_listed_takes_the_next_number_once() -> None:
    """Its clock was ahead at that start, and its disk was lost or restored since. All that it sent was refused."""

    def listing(parent: Roster, incarnation: int) -> CertifiedRoster:
        return certify(child_of(parent, [member(A, incarnation=incarnation), member(B), member(C)]), [B, C])

    here = membership_of(A, founding(), roster_1(3), incarnation=3)
    first = listing(ROSTER, 3)
    assert "identity" not in [action.topic for action in here.take_rosters((first,), NOW) if isinstance(action, Report)]
    assert here.me.incarnation == 3
    second = listing(first.roster, 9)
    (report,) = [
        action.text
        for action in here.take_rosters((second,), NOW)
        if isinstance(action, Report) and action.topic == "identity"
    ]
    assert report == (
        "roster 3 lists start 9 of this peer, but this is start 3: either its clock was ahead then (nothing to do), or "
        "another process uses a copy of its state directory (stop one of them, and give it its own state directory)"
    )
    here.ready = True
    word = here.declaration(NOW)
    assert word is not None
    assert word.incarnation == here.me.incarnation == 10
    here.take_rosters((listing(second.roster, 12),), NOW)
    assert here.me.incarnation == 10, "a copy of its disk would do the same, and neither would stop"


def test_a_good_bye_from_before_the_listing_does_not_take_a_member_away() -> None:
    roster = child_of(
        founding().roster,
        [member(peer, since=10, incarnation=2 if peer == B else 1) for peer in (A, B, C, D)],
        cycle=10,
    )
    here = membership_of(A, founding(), certify(roster, [BOOT], ballot_number(20, 0)))
    now = here.rules.clock.begin(40)
    assert here.take_heartbeat(heartbeat(B, incarnation=2, sequence=7), now)
    assert here.pass_on(declaration(B, incarnation=9, leaving=True, cycle=3), C, now) == []
    assert B in here.alive(now)


def test_a_good_bye_is_forgotten_once_its_peer_is_listed_again() -> None:
    """As for a peer that slept while the member was dropped and came back."""
    three = [member(peer, since=1) for peer in (A, C, D)]
    first = child_of(founding().roster, [*three, member(B, incarnation=9, since=1)], cycle=1)
    second = child_of(first, three, cycle=4)
    third = child_of(second, [*three, member(B, incarnation=2, since=10, counts=False)], cycle=10)
    here = membership_of(A, founding(), certify(first, [BOOT], ballot_number(2, 0)))
    assert here.take_declaration(declaration(B, incarnation=9, leaving=True, cycle=3), 3)
    now = here.rules.clock.begin(40)
    rosters = certify(second, [A, C, D], ballot_number(8, 0)), certify(third, [A, C, D], ballot_number(20, 0))
    here.take_rosters(rosters, now)
    here.tick(now)
    assert here.take_heartbeat(heartbeat(B, incarnation=2), now)
    assert B in here.alive(now)
