"""Who is here, and one member's part in certifying rosters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ROUND_SECONDS, peer_id, sign_as
from made import NO_SIGNATURE, certify, child_of, founding, goodbye, heartbeat, ids, member, membership_of, roster_1

from p2p_diloco.ids import PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.protocol import membership as module
from p2p_diloco.protocol.actions import Action, KeepBallots, Report, Send
from p2p_diloco.protocol.ballot import Ballots, Bond, Promise, Proposal, Vote, ballot_number
from p2p_diloco.protocol.clock import LEAD_TURN_SHARE, LEAD_TURNS
from p2p_diloco.protocol.messages import RosterReply, RosterRequest
from p2p_diloco.protocol.roster import MOST_LEVELS, CertifiedRoster, Roster, lead_order, vote_statement
from p2p_diloco.protocol.roster_delta import CertifiedDelta, ProposalDelta, certified_delta

A, B, C = ids(3)
ROSTER = roster_1(3).roster
VOTING = 3
NOW = VOTING * ROUND_SECONDS + 0.1
BALLOT = ballot_number(VOTING, 0)
LEAD = lead_order(ROSTER, VOTING)[0]
OTHER = next(peer for peer in ids(3) if peer != LEAD)


def member_of_three(peer: bytes = OTHER, **changes: object) -> module.Membership:
    return membership_of(peer, founding(), roster_1(3), **changes)  # type: ignore[arg-type]


def sent(actions: list[Action], kind: type) -> list[Send]:
    return [action for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def proposal(**changes: object) -> Proposal:
    roster = replace(child_of(ROSTER, ROSTER.members, cycle=1), **changes)  # type: ignore[arg-type]
    return signed(Proposal(ballot=BALLOT, roster=roster, signature=NO_SIGNATURE))


def signed(word: Proposal, lead: PeerId = LEAD) -> Proposal:
    return replace(word, signature=sign_as(lead, word.statement()))


def test_who_leaves_says_what_it_was_bound_to_and_votes_no_more() -> None:
    here = member_of_three()
    here.tick(NOW)
    word = here.say_goodbye()
    assert (word.k, word.promised, word.voted) == (1, BALLOT, False)
    assert here.take_proposal(LEAD, proposal(), NOW) == []
    nobody = membership_of(A).say_goodbye()
    assert (nobody.k, nobody.parent) == (0, bytes(32))


def test_in_the_voting_round_a_member_promises_once_in_each_turn() -> None:
    here = member_of_three()
    actions = here.tick(NOW)
    assert isinstance(actions[0], KeepBallots)
    assert [send.to for send in sent(actions, Promise)] == [LEAD]
    assert here.tick(NOW + 0.1) == []
    assert here.tick(2 * ROUND_SECONDS) == []
    assert here.tick(-5.0) == []


def test_a_member_votes_for_the_leads_proposal() -> None:
    here = member_of_three()
    keep, send = here.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(keep, KeepBallots)
    assert isinstance(send, Send)
    assert isinstance(send.message, Vote)
    assert here.take_proposal(LEAD, proposal(regrid=5), NOW) == []


@pytest.mark.parametrize(
    ("asked", "now"),
    [
        (proposal(parent=sha256(b"other")), NOW),
        (proposal(level=1, epoch=1), NOW),
        (proposal(cycle=99), NOW),
        (replace(proposal(), ballot=0), NOW),
        (replace(proposal(), ballot=1 << 60), NOW),
        (proposal(), NOW + 5 * ROUND_SECONDS),
    ],
)
def test_a_proposal_that_must_not_bind_gets_no_vote(asked: Proposal, now: float) -> None:
    assert member_of_three().take_proposal(LEAD, asked, now) == []


def test_a_proposal_that_could_never_be_certified_is_reported() -> None:
    (report,) = member_of_three().take_proposal(LEAD, proposal(members=()), NOW)
    assert isinstance(report, Report)
    assert "has no members" in report.text


def test_only_the_lead_of_the_ballot_is_voted_for() -> None:
    assert member_of_three().take_proposal(LEAD, signed(proposal(), OTHER), NOW) == []
    assert member_of_three().take_proposal(OTHER, proposal(), NOW) != [], "whoever hands on what the lead has signed"


def test_a_peer_that_lost_its_memory_does_not_vote() -> None:
    assert member_of_three(remembers=False, incarnation=2).take_proposal(LEAD, proposal(), NOW) == []
    assert member_of_three(remembers=True, incarnation=2).take_proposal(LEAD, proposal(), NOW)


def lead_that_hears_all() -> module.Membership:
    lead = member_of_three(LEAD)
    lead.ready = True
    for peer in set(ids(3)) - {LEAD}:
        lead.hear(heartbeat(peer), NOW)
    return lead


def promise_of(peer: bytes, **changes: object) -> Promise:
    word = Promise(parent=ROSTER.digest(), level=0, ballot=BALLOT, voted=None, signature=NO_SIGNATURE)
    word = replace(word, **changes)  # type: ignore[arg-type]
    return replace(word, signature=sign_as(peer, word.statement()))  # type: ignore[arg-type]


def test_a_lead_takes_promises_proposes_and_spreads_the_certificate() -> None:
    lead = lead_that_hears_all()
    assert sent(lead.tick(NOW), ProposalDelta) == []
    actions = lead.take_promise(OTHER, promise_of(OTHER), NOW)
    (asked, *_) = sent(actions, ProposalDelta)
    voter = member_of_three()
    whole = voter.rebuilt(LEAD, asked.message, NOW)  # type: ignore[arg-type]
    assert isinstance(whole, Proposal)
    (ballot,) = sent(voter.take_proposal(LEAD, whole, NOW), Vote)
    lead.take_vote(OTHER, ballot.message, NOW)  # type: ignore[arg-type]
    in_force = lead.book.in_force
    assert in_force is not None
    assert (in_force.k, in_force.peers()) == (2, frozenset(ids(3)))
    assert lead.take_vote(OTHER, ballot.message, NOW) == []  # type: ignore[arg-type]


CHILD = certify(child_of(ROSTER, ROSTER.members, cycle=1), ids(3))


def test_a_certified_roster_goes_to_members_of_its_parent_as_a_difference_and_whole_to_others() -> None:
    here = member_of_three(A)
    stranger = peer_id("stranger")
    sends = {send.to: send for send in here.spread(CHILD, {B, C, stranger}, 9.0) if isinstance(send, Send)}
    assert sends.keys() == {B, C, stranger}
    assert sends[stranger].message == RosterReply(rosters=(CHILD,))
    for peer in (B, C):
        word = sends[peer].message
        assert isinstance(word, CertifiedDelta)
        assert member_of_three(peer).rebuilt(A, word, NOW) == CHILD


@pytest.mark.parametrize("odd", [certify(CHILD.roster, [A, peer_id("stranger")]), founding()])
def test_what_cannot_be_told_as_a_difference_goes_whole(odd: CertifiedRoster) -> None:
    (send,) = member_of_three(A).spread(odd, {B}, 9.0)
    assert isinstance(send, Send)
    assert send.message == RosterReply(rosters=(odd,))


def difference_of_child() -> CertifiedDelta:
    word = certified_delta(CHILD, ROSTER)
    assert word is not None
    return word


def test_who_does_not_know_the_parent_asks_for_whole_rosters() -> None:
    ask = membership_of(B, founding()).rebuilt(A, difference_of_child(), NOW)
    assert isinstance(ask, Send)
    assert (ask.to, ask.message) == (A, RosterRequest(known=(founding().roster.digest(),)))


def test_a_difference_that_does_not_hold_is_reported() -> None:
    word = difference_of_child()
    wrong = replace(word, delta=replace(word.delta, runs=((9, 1),)))
    report = member_of_three().rebuilt(A, wrong, NOW)
    assert isinstance(report, Report)
    assert report.topic == "roster-refused"
    assert "handed on a difference that does not hold: roster 2 comes as a difference that takes place" in report.text


@pytest.mark.parametrize(
    "word",
    [
        promise_of(OTHER, parent=sha256(b"other")),
        promise_of(OTHER, level=1),
        promise_of(OTHER, ballot=0),
        promise_of(OTHER, ballot=ballot_number(VOTING + 9, 0)),
    ],
)
def test_promises_for_something_else_are_dropped(word: Promise) -> None:
    assert lead_that_hears_all().take_promise(OTHER, word, NOW) == []


def test_shares_of_averaging_go_from_signs_of_life_onto_the_next_roster() -> None:
    lead = member_of_three(LEAD)
    lead.ready = True
    lead.share = 4
    for peer in set(ids(3)) - {LEAD}:
        lead.hear(heartbeat(peer, share=1 if peer == OTHER else 8), NOW)
    here = lead.present(NOW)
    assert (here[LEAD].share, here[OTHER].share) == (4, 1)
    assert sorted(m.share for m in here.values()) == [1, 4, 8]


def test_a_lead_that_is_not_ready_and_hears_nobody_proposes_nothing() -> None:
    lead = member_of_three(LEAD)
    lead.tick(NOW)
    assert lead.take_promise(OTHER, promise_of(OTHER), NOW) == []


BOOT = peer_id("boot")
STAND_IN_BALLOT = ballot_number(VOTING, LEAD_TURNS - 2)
LAST_GONE = certify(replace(ROSTER, members=(member(A), member(B, dialable=False), member(C, dialable=False))), [BOOT])
"""Of three members only A can be dialled."""


def helper_that_hears(*peers: bytes, dialable: bool = False, line: bytes = b"") -> module.Membership:
    roster = sha256(line) if line else LAST_GONE.roster.digest()
    helper = membership_of(BOOT, founding(), LAST_GONE, trains=False)
    for peer in peers:
        helper.hear(heartbeat(peer, can_be_dialled=dialable, roster=roster), NOW)
    return helper


def promise_to_helper(peer: bytes, level: int = 0) -> Promise:
    return promise_of(peer, parent=LAST_GONE.roster.digest(), ballot=STAND_IN_BALLOT, level=level)


def test_when_the_last_who_could_be_dialled_is_gone_the_helper_leads_and_is_the_hub_again() -> None:
    helper = helper_that_hears(B, C)
    assert not helper.is_hub()
    assert helper.tick(NOW + 2 * ROUND_SECONDS * LEAD_TURN_SHARE) == []
    assert helper.take_promise(B, promise_to_helper(B), NOW) == []
    asked = sent(helper.take_promise(C, promise_to_helper(C), NOW), ProposalDelta)
    assert {action.to for action in asked} == {A, B, C}
    voters = {peer: membership_of(peer, founding(), LAST_GONE) for peer in (B, C)}
    for peer, voter in voters.items():
        whole = voter.rebuilt(BOOT, asked[0].message, NOW)  # type: ignore[arg-type]
        assert isinstance(whole, Proposal)
        (ballot,) = sent(voter.take_proposal(BOOT, whole, NOW), Vote)
        helper.take_vote(peer, ballot.message, NOW)  # type: ignore[arg-type]
    in_force = helper.book.in_force
    assert in_force is not None
    assert (in_force.k, in_force.peers()) == (2, frozenset((B, C)))
    assert helper.is_hub()


def test_the_helper_does_not_lead_while_it_hears_a_member_that_can_be_dialled() -> None:
    helper = helper_that_hears(A, B, C, dialable=True)
    for peer in (B, C):
        assert helper.take_promise(peer, promise_to_helper(peer), NOW) == []


def test_the_helper_leads_where_the_one_that_can_be_dialled_went_on_alone_on_another_line() -> None:
    """It led its own line, and the two of three that were back could not go on before they were stalled too."""
    helper = helper_that_hears(A, B, C, dialable=True, line=b"another")
    assert helper.take_promise(B, promise_to_helper(B), NOW) == []
    assert sent(helper.take_promise(C, promise_to_helper(C), NOW), ProposalDelta)


def test_the_helper_takes_the_level_of_the_first_member_that_promises() -> None:
    helper = helper_that_hears(B)
    stranger = peer_id("stranger")
    assert helper.take_promise(stranger, promise_to_helper(stranger, level=5), NOW) == []
    asked = sent(helper.take_promise(B, promise_to_helper(B, level=MOST_LEVELS), NOW), ProposalDelta)
    assert {action.to for action in asked} == {A, B, C}
    assert helper.take_promise(C, promise_to_helper(C), NOW) == []


@pytest.mark.parametrize(("void", "level"), [(0, 0), (7, 0), (8, 1), (23, 1), (24, 2), (55, 2), (56, 3), (10**9, 12)])
def test_each_wait_is_twice_as_long_as_the_one_before(void: int, level: int) -> None:
    here = member_of_three()
    here.void_cycles = void
    assert here.level() == level <= MOST_LEVELS


def test_a_lone_member_is_a_majority_however_long_it_has_waited_for_others() -> None:
    """Who waited alone certified its next roster the degraded way, and those who joined it refused that for long."""
    here = membership_of(peer_id("boot"), founding())
    here.void_cycles = 10**9
    assert here.level() == 0


def test_a_lone_member_that_said_good_bye_comes_back_the_degraded_way() -> None:
    """Its earlier incarnation does not vote again, and nobody else can."""
    here = membership_of(peer_id("boot"), founding())
    here.say_goodbye()
    here.void_cycles = 8
    assert here.level() == 1


def test_a_roster_that_does_not_hold_is_reported_and_ends_the_list() -> None:
    here = membership_of(A, founding())
    child = child_of(ROSTER, ROSTER.members)
    (report,) = here.take_rosters((certify(child, [A, B]), roster_1(3)), 0.0)
    assert isinstance(report, Report)
    assert report.topic == "roster-refused"


def test_another_branch_is_announced_and_its_sum_taken_over() -> None:
    alone = certify(replace(ROSTER, level=1, epoch=1), [peer_id("boot")])
    here = membership_of(A, founding(), alone)  # one that went on with a majority would not be left
    here.included_total = 50
    branch = certify(replace(ROSTER, included_total=9), [peer_id("boot")])
    topics = [action.topic for action in here.take_rosters((branch,), NOW) if isinstance(action, Report)]
    assert topics == ["roster", "branch"]
    assert here.included_total == 9


def test_what_is_kept_of_strangers_goes_with_them() -> None:
    here = member_of_three(A)
    stranger = peer_id("stranger")
    here.hear(heartbeat(stranger), 0.0)
    here.take_goodbye(goodbye(stranger))
    here.took_part = {stranger: 3, B: 4}
    here.take_rosters((certify(child_of(ROSTER, ROSTER.members), ids(3)),), 1000.0)
    assert stranger not in here.heard
    assert here.took_part == {B: 4}
    assert not here.has_left(member(stranger))


def test_nobody_votes_for_a_peer_that_the_manifest_does_not_list() -> None:
    here = member_of_three()
    here.rules = replace(here.rules, listed=frozenset({B, C}))
    (report,) = here.take_proposal(LEAD, proposal(), NOW)
    assert isinstance(report, Report)
    assert "does not list" in report.text
    here.rules = replace(here.rules, listed=frozenset(ROSTER.peers()))
    assert sent(here.take_proposal(LEAD, proposal(), NOW), Vote)


def test_who_has_voted_names_no_parent_under_that_roster_in_later_rounds() -> None:
    here, digest = member_of_three(), ROSTER.digest()
    assert here.may_name_parents(digest, VOTING + 9)
    here.take_proposal(LEAD, proposal(), NOW)
    assert here.may_name_parents(digest, VOTING), "should it be certified, it governs the next round"
    assert not here.may_name_parents(digest, VOTING + 1)
    assert here.may_name_parents(CHILD.roster.digest(), VOTING + 1)
    again = ballot_number(VOTING + 1, 0)
    lead = lead_order(ROSTER, VOTING + 1)[0]
    here.take_proposal(lead, signed(replace(proposal(), ballot=again), lead), NOW + ROUND_SECONDS)
    assert not here.may_name_parents(digest, VOTING + 1), "the first vote may have been enough"


def test_nobody_votes_in_a_ballot_of_a_round_before_the_last_one_in_which_it_named_parents() -> None:
    """Certified in that ballot, the child would govern a round in which this peer has named parents under another."""
    here = member_of_three()
    here.named_round = VOTING + 1
    assert here.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS) == []
    here.named_round = VOTING
    assert here.take_proposal(LEAD, proposal(), NOW + ROUND_SECONDS)


def test_nobody_votes_before_the_voting_round_whoever_asks() -> None:
    """A lead that asks just under half of the members would silence them for the rest of the cycle."""
    here, early = member_of_three(), VOTING - 1
    lead = lead_order(ROSTER, early)[0]
    asked = signed(replace(proposal(), ballot=ballot_number(early, 0)), lead)
    assert here.take_proposal(lead, asked, early * ROUND_SECONDS + 0.1) == []
    assert here.may_name_parents(ROSTER.digest(), VOTING)


def test_a_good_bye_binds_to_the_last_round_in_which_parents_were_named() -> None:
    here = member_of_three()
    here.named_round = VOTING
    assert here.say_goodbye().promised == ballot_number(VOTING, 0)
    assert not here.may_name_parents(ROSTER.digest(), VOTING + 1)


AFTER = VOTING + 1
"""Roster 1 is of cycle 0 and should have had a child at the end of cycle 1."""


def after_lead(turn: int = 0) -> PeerId:
    return lead_order(ROSTER, AFTER)[turn]


def test_without_a_certificate_members_promise_on_in_each_turn_of_every_round() -> None:
    here = member_of_three(next(peer for peer in ids(3) if peer != after_lead()))
    begin = AFTER * ROUND_SECONDS
    (promise,) = sent(here.tick(begin + 0.1), Promise)
    assert promise.to == after_lead()
    assert here.tick(begin + 0.2) == []
    assert here.tick(begin + 0.1 + LEAD_TURN_SHARE * ROUND_SECONDS)
    assert here.tick(2 * ROUND_SECONDS) == [], "before the voting round there is no vote to come true"


def test_a_founder_whose_vote_was_not_certified_goes_on_with_it() -> None:
    boot = peer_id("boot")
    here = membership_of(boot, founding())
    assert here.tick(2 * ROUND_SECONDS + 0.1) == []
    roster = child_of(founding().roster, [member(A)])
    bonds = Ballots(
        parent=founding().roster.digest(), bonds=(Bond(level=0, promised=1, voted=(ballot_number(1, 0), roster)),)
    )
    again = membership_of(boot, founding(), ballots=bonds)
    again.tick(2 * ROUND_SECONDS + 0.1)
    assert again.book.in_force == roster


def test_after_the_voting_round_a_lead_proposes_only_what_has_been_voted_for() -> None:
    lead = member_of_three(after_lead())
    others = sorted(set(ids(3)) - {lead.me.peer})
    lead.ready = True
    for peer in others:
        lead.hear(heartbeat(peer), AFTER * ROUND_SECONDS)
    now, ballot = AFTER * ROUND_SECONDS + 0.1, ballot_number(AFTER, 0)
    lead.tick(now)
    assert lead.take_promise(others[0], promise_of(others[0], ballot=ballot), now) == []
    voted = (BALLOT, proposal().roster)
    actions = lead.take_promise(others[1], promise_of(others[1], ballot=ballot, voted=voted), now)
    assert {send.to for send in sent(actions, ProposalDelta)} == set(others)
    lead.take_vote(others[0], vote_of(others[0], voted[1], ballot), now)
    assert lead.book.in_force == voted[1]


def vote_of(peer: PeerId, roster: Roster, ballot: int) -> Vote:
    signature = sign_as(peer, vote_statement(roster.digest(), ballot))
    return Vote(parent=roster.parent, roster=roster.digest(), ballot=ballot, signature=signature)


def test_who_promises_for_a_roster_that_has_a_child_is_sent_the_certificate() -> None:
    here = member_of_three(LEAD)
    here.take_rosters((CHILD,), NOW)
    (told,) = here.take_promise(OTHER, promise_of(OTHER), NOW)
    assert isinstance(told, Send)
    assert told.message == RosterReply(rosters=(CHILD,))
    assert here.take_promise(peer_id("stranger"), promise_of(peer_id("stranger")), NOW) == []
    assert here.take_promise(OTHER, promise_of(OTHER, parent=sha256(b"unknown")), NOW) == []


def test_an_owner_that_gets_no_entries_is_reported_and_loses_its_place_on_the_next_roster() -> None:
    here = member_of_three(LEAD)
    rules, here.ready = here.rules, True
    roster, grid = here.book.folded[ROSTER.digest()]
    silent = next(peer for peer in sorted(grid.reducers()) if peer != LEAD)
    said: list[Action] = []
    for round_index in range(1, 1 + 3 * rules.clock.num_fragments):
        fragment = rules.clock.fragment(round_index)
        for index in range(rules.num_spans[fragment]):
            if grid.owner(SpanId(fragment, index)) != silent:
                here.owners.entry_absorbed(round_index, SpanId(fragment, index), roster, grid)
        said += here.round_over(round_index)
    (report,) = said
    assert isinstance(report, Report)
    assert report.topic == "reducer-lost"
    assert report.text.startswith(f"the spans of {short_peer_id(silent)} got no entries for 2 cycles while others' did")
    assert here.owners.lost() == {(silent, 1)}


def test_who_is_not_ready_draws_nothing_from_its_logs() -> None:
    here = member_of_three(LEAD)
    assert here.round_over(1) == []
    here.ready = True
    assert here.round_over(0) == [], "the round before the first entries"
