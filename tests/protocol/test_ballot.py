"""Single-decree Paxos among the electorate of a roster: one child, which follows from the promises shown."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from fake_run import peer_id, sign_as, verify
from hypothesis import given, settings
from hypothesis import strategies as st
from made import NO_SIGNATURE, child_of, declaration, ids, member, proof_of, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.wire.ballot import (
    MOST_PROMISES,
    NO_BALLOTS,
    Ballots,
    Candidacy,
    Promise,
    Promised,
    Proposal,
    Quorum,
    Rule,
    View,
    Vote,
    add_promise,
    add_vote,
    certificate,
    check_proposal,
    promise,
    propose,
    vote,
)
from p2p_diloco.protocol.wire.frames import FrameReader, take_value, to_bytes
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.roster import Roster, is_majority, is_quarter, vote_statement

PARENT = roster_of(4)
A, B, C, D = ids(4)
STRANGER = peer_id("stranger")
FRESH = replace(PARENT, members=(*PARENT.members[:3], member(D, counts=False)))
"""D is a member without a vote."""


def rule_of(parent: Roster, *, degraded: bool = False) -> Rule:
    """A rule for tests: the next roster's height is the sum of the heights that its promises report."""

    def rule(promises: tuple[Promise, ...]) -> Roster | None:
        total = sum(each.view.height for each in promises)
        return child_of(parent, parent.members, height=total, degraded=degraded) if total else None

    return rule


def quorum_of(parent: Roster) -> Quorum:
    return lambda peers: is_majority(parent, peers)


RULE, QUORUM = rule_of(PARENT), quorum_of(PARENT)


def view(height: int = 1, declarations: tuple[Declaration, ...] = (), bitmap: bytes = b"\0") -> View:
    return View(
        absent=bitmap, heard=bitmap, counting=bitmap, idle=bitmap, height=height, declarations=declarations
    )  # fmt: skip


def said(
    peer: PeerId,
    ballot: int,
    *,
    voted: Proposal | None = None,
    seen: View | None = None,
    parent: Roster = PARENT,
    degraded: bool = False,
) -> Promised:
    unsigned = Promise(
        parent=parent.digest(),
        degraded=degraded,
        ballot=ballot,
        voted=(voted.ballot, voted.roster.digest()) if voted is not None else None,
        view=seen if seen is not None else view(),
        voter=peer,
        signature=NO_SIGNATURE,
    )
    return Promised(promise=replace(unsigned, signature=sign_as(peer, unsigned.statement())), voted=voted)


def added(candidacy: Candidacy, word: Promised, sender: PeerId | None = None, rule: Rule = RULE) -> Candidacy:
    quorum = quorum_of(candidacy.parent)
    return add_promise(candidacy, sender or word.promise.voter, word, rule, quorum, verify)


def candidacy(ballot: int, *words: Promised, parent: Roster = PARENT) -> Candidacy:
    found = Candidacy(parent=parent, degraded=False, ballot=ballot)
    for word in words:
        found = added(found, word)
    return propose(found, rule_of(parent), quorum_of(parent))


def proposal(ballot: int, height: int = 1, peers: Collection[PeerId] = (A, B, C)) -> Proposal:
    """The proposal that follows from these peers' promises, each of which reports this height."""
    found = candidacy(ballot, *(said(peer, ballot, seen=view(height)) for peer in peers)).proposal
    assert found is not None
    return found


def vote_of(peer: PeerId, proposal: Proposal) -> Vote:
    digest = proposal.roster.digest()
    signature = sign_as(peer, vote_statement(digest, proposal.ballot))
    return Vote(parent=proposal.roster.parent, roster=digest, ballot=proposal.ballot, signature=signature)


def check(proposal: Proposal, parent: Roster = PARENT) -> None:
    check_proposal(proposal, parent, rule_of(parent), quorum_of(parent), verify)


# -- what one member is bound to


def test_a_promise_forbids_lower_ballots() -> None:
    bound = promise(NO_BALLOTS, PARENT.digest(), 8, degraded=False)
    assert bound is not None
    assert promise(bound, PARENT.digest(), 7, degraded=False) is None
    assert vote(bound, proposal(7)) is None
    assert promise(bound, PARENT.digest(), 8, degraded=False) == bound
    assert vote(bound, proposal(8)) is not None


def test_no_peer_votes_for_two_rosters_in_one_ballot() -> None:
    bound = vote(NO_BALLOTS, proposal(8))
    assert bound is not None
    assert vote(bound, proposal(8, height=7)) is None
    assert vote(bound, proposal(8)) == bound
    assert vote(bound, proposal(9, height=7)) is not None


def test_a_degraded_child_is_a_separate_decision_and_a_new_parent_resets_ballots() -> None:
    voted = proposal(8)
    bound = vote(NO_BALLOTS, voted)
    assert bound is not None
    both = promise(bound, PARENT.digest(), 3, degraded=True)
    assert both is not None
    assert both.bond(PARENT.digest(), degraded=False).voted == voted
    assert both.bond(PARENT.digest(), degraded=True).promised == 3
    later = promise(both, voted.roster.digest(), 9, degraded=False)
    assert later is not None
    assert later.bond(PARENT.digest(), degraded=False).voted is None


def test_ballots_survive_a_round_trip_to_disk() -> None:
    bound = vote(NO_BALLOTS, proposal(8))
    assert bound is not None
    assert take_value(FrameReader(to_bytes(bound)), Ballots) == bound


# -- leading


def test_a_leader_proposes_by_rule_once_a_majority_has_promised() -> None:
    assert candidacy(8, said(A, 8), said(B, 8)).proposal is None
    ready = candidacy(8, said(A, 8), said(B, 8), said(C, 8))
    assert ready.proposal is not None
    assert ready.proposal.roster == child_of(PARENT, PARENT.members, height=3)
    assert ready.proposal.reasons == ready.proposal.promises
    check(ready.proposal)
    later = added(ready, said(D, 8, seen=view(9)))
    assert propose(later, RULE, QUORUM) is later, "one proposal in a ballot"


def test_nothing_is_proposed_if_nothing_changes() -> None:
    quiet = candidacy(8, *(said(peer, 8, seen=view(0)) for peer in (A, B, C)))
    assert quiet.proposal is None
    assert propose(added(quiet, said(D, 8)), RULE, QUORUM).proposal is not None


def test_the_order_of_promises_does_not_matter() -> None:
    words = [said(A, 8, seen=view(3)), said(B, 8, seen=view(5)), said(C, 8)]
    assert candidacy(8, *words).proposal == candidacy(8, *reversed(words)).proposal


def test_an_earlier_vote_is_proposed_again_with_the_promises_from_which_it_followed() -> None:
    first = proposal(5, height=7)
    second = candidacy(8, said(A, 8), said(B, 8, voted=first), said(D, 8)).proposal
    assert second is not None
    assert (second.roster, second.origin) == (first.roster, first.promises)
    check(second)
    third = candidacy(11, said(C, 11, voted=second), said(B, 11, voted=first), said(D, 11)).proposal
    assert third is not None
    assert (third.roster, third.origin) == (first.roster, first.promises), "as often as it takes"
    check(third)


def test_the_later_of_two_earlier_votes_is_proposed_again_even_if_nothing_would_change() -> None:
    early, late = proposal(3, height=2), proposal(5, height=7)
    words = (said(A, 8, voted=late, seen=view(0)), said(B, 8, voted=early, seen=view(0)), said(C, 8, seen=view(0)))
    found = candidacy(8, *words).proposal
    assert found is not None
    assert found.roster == late.roster
    check(found)


FIRST, SECOND = proposal(3, height=2), proposal(5, height=7)
UNSIGNED = replace(declaration(STRANGER), signature=NO_SIGNATURE)
UNSIGNED_PROMISE = replace(said(B, 8), promise=replace(said(B, 8).promise, signature=NO_SIGNATURE))
FOREIGN = declaration(STRANGER, run=sha256(b"other"))
FORGED = declaration(STRANGER, proofs=(replace(proof_of(STRANGER), signature=NO_SIGNATURE),))
LONG = tuple(declaration(peer_id(f"new {number}")) for number in range(9))
BAD_PROMISES: list[tuple[str, Promised, str]] = [
    ("of another ballot", said(B, 9), "is for another ballot than 8"),
    ("for a degraded child", said(B, 8, degraded=True), "is for another ballot"),
    ("for a child of another parent", said(B, 8, parent=FRESH), "is for another ballot"),
    ("of a stranger", said(STRANGER, 8), "does not vote"),
    ("without a signature", UNSIGNED_PROMISE, "is not signed by it"),
    ("with a bitmap too long", said(B, 8, seen=view(bitmap=b"\0\0")), "has a bitmap that does not fit 4 members"),
    ("with a bitmap too short", said(B, 8, seen=view(bitmap=b"")), "has a bitmap that does not fit 4 members"),
    ("with an unsigned declaration", said(B, 8, seen=view(declarations=(UNSIGNED,))), "did not sign"),
    ("with a declaration of another run", said(B, 8, seen=view(declarations=(FOREIGN,))), "did not sign"),
    ("with a proof that its prover did not sign", said(B, 8, seen=view(declarations=(FORGED,))), "or a prover did not"),
    ("with more declarations than fit", said(B, 8, seen=view(declarations=LONG)), "shows more than 2304 bytes"),
    ("that hides its vote", replace(said(B, 8, voted=proposal(5)), voted=None), "did not show what it has voted"),
    ("that shows a vote it does not name", replace(said(B, 8), voted=FIRST), "did not show what it has voted"),
    ("that shows another vote", replace(said(B, 8, voted=SECOND), voted=FIRST), "did not show what it has voted"),
    ("after a vote still to come", said(B, 8, voted=proposal(9)), "voted in a ballot that is still to come"),
    ("after a vote for what does not follow",
     said(B, 8, voted=replace(proposal(5), roster=child_of(PARENT, PARENT.members, height=99))), "does not follow"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "text"), [case[1:] for case in BAD_PROMISES], ids=[case[0] for case in BAD_PROMISES])
def test_a_promise_that_no_honest_voter_makes_is_refused(word: Promised, text: str) -> None:
    begun = candidacy(8, said(A, 8))
    with pytest.raises(PeerError, match=text):
        added(begun, word)


def test_a_declaration_shown_by_all_promises_is_checked_once() -> None:
    word, seen = declaration(STRANGER), []

    def counted(peer: PeerId, statement: bytes, signature: bytes) -> bool:
        seen.append(peer)
        return verify(peer, statement, signature)

    words = tuple(said(peer, 8, seen=view(declarations=(word,))).promise for peer in (A, B, C))
    roster = RULE(words)
    assert roster is not None
    check_proposal(Proposal(ballot=8, roster=roster, promises=words, origin=()), PARENT, RULE, QUORUM, counted)
    assert sorted(seen) == sorted((A, B, C, STRANGER, peer_id("boot"))), "and so is its proof"


def test_a_promise_sent_by_another_peer_is_refused() -> None:
    with pytest.raises(PeerError, match="handed in a promise of"):
        added(candidacy(8), said(B, 8), sender=A)


def test_a_member_without_a_vote_promises_only_to_a_degraded_child() -> None:
    ordinary = Candidacy(parent=FRESH, degraded=False, ballot=8)
    with pytest.raises(PeerError, match="does not vote"):
        added(ordinary, said(D, 8, parent=FRESH), rule=rule_of(FRESH))
    stalled = replace(ordinary, degraded=True)
    word = said(D, 8, parent=FRESH, degraded=True)
    assert added(stalled, word, rule=rule_of(FRESH, degraded=True)).promises == {D: word}


def test_content_shown_by_all_voters_is_checked_once() -> None:
    voted, calls = proposal(5, height=7), []

    def counted(promises: tuple[Promise, ...]) -> Roster | None:
        calls.append(promises)
        return RULE(promises)

    begun = candidacy(8)
    for peer in (A, B):
        begun = add_promise(begun, peer, said(peer, 8, voted=voted), counted, QUORUM, verify)
    assert len(calls) == 2
    add_promise(begun, C, said(C, 8, voted=voted), counted, QUORUM, verify, (voted,))
    assert len(calls) == 2


# -- what a voter refuses


WITH_VOTE = candidacy(8, said(A, 8, voted=SECOND), said(B, 8, voted=FIRST), said(C, 8)).proposal
assert WITH_VOTE is not None
WORDS_8 = tuple(said(peer, 8).promise for peer in (A, B, C))
ORIGIN = tuple(said(peer, 5, seen=view(7)).promise for peer in (A, B, C))
OTHER_PARENT = replace(PARENT, cycle=1)
BAD_PROPOSALS: list[tuple[str, Proposal, str]] = [
    ("a roster that does not follow",
     replace(proposal(8), roster=child_of(PARENT, PARENT.members, height=9)), "does not follow from the promises"),
    ("a roster without a member",
     replace(proposal(8), roster=child_of(PARENT, PARENT.members[1:], height=3)), "does not follow from the promises"),
    ("too few promises", replace(proposal(8), promises=WORDS_8[:2]), "shows 2 promises, which are not enough"),
    ("a promise three times", replace(proposal(8), promises=WORDS_8[:1] * 3), "is shown twice"),
    ("promises of another ballot", replace(proposal(8), ballot=9), "is for another ballot than 9"),
    ("a promise for another parent",
     replace(proposal(8), promises=(*WORDS_8[:2], said(C, 8, parent=OTHER_PARENT).promise)), "is for another ballot"),
    ("a promise of a stranger", replace(proposal(8), promises=(*WORDS_8, said(STRANGER, 8).promise)), "does not vote"),
    ("a promise for a degraded child",
     replace(proposal(8), promises=(*WORDS_8[:2], said(C, 8, degraded=True).promise)), "is for another ballot"),
    ("an unsigned promise",
     replace(proposal(8), promises=(*WORDS_8[:2], replace(WORDS_8[2], signature=NO_SIGNATURE))), "is not signed by it"),
    ("an unsigned declaration",
     replace(proposal(8), promises=(*WORDS_8[:2], said(C, 8, seen=view(declarations=(UNSIGNED,))).promise)),
     "shows a declaration that .* did not sign"),
    ("an earlier vote that is hidden",
     replace(WITH_VOTE, roster=proposal(8).roster, origin=()), "is not the one that was voted for"),
    ("the older of two votes",
     replace(WITH_VOTE, roster=FIRST.roster, origin=FIRST.promises), "is not the one that was voted for"),
    ("reasons of no vote", replace(proposal(8), origin=SECOND.promises), "is not the one that was voted for"),
    ("a vote without its reasons", replace(WITH_VOTE, origin=()), "is not the one that was voted for"),
    ("too few reasons", replace(WITH_VOTE, origin=SECOND.promises[:2]), "does not show the promises from which"),
    ("reasons of two ballots",
     replace(WITH_VOTE, origin=(*ORIGIN[:2], said(C, 3).promise)), "is for another ballot than 5"),
    ("reasons from which something else followed", replace(WITH_VOTE, origin=FIRST.promises), "does not follow from"),
    ("reasons that name a vote themselves",
     replace(WITH_VOTE, origin=(*ORIGIN[:2], said(C, 5, voted=FIRST, seen=view(7)).promise)),
     "does not show the promises from which"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "text"), [case[1:] for case in BAD_PROPOSALS], ids=[case[0] for case in BAD_PROPOSALS])
def test_a_proposal_with_a_defect_is_refused(bad: Proposal, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        check(bad)


def test_the_promise_of_a_member_without_a_vote_does_not_count() -> None:
    words = tuple(said(peer, 8, parent=FRESH).promise for peer in (A, B, D))
    roster = rule_of(FRESH)(words)
    assert roster is not None
    with pytest.raises(PeerError, match="does not vote"):
        check(Proposal(ballot=8, roster=roster, promises=words, origin=()), FRESH)


def test_a_leader_cannot_count_one_promise_twice() -> None:
    """The rule counts promises: the leader's own promise, repeated, would be more than half."""
    words = (*WORDS_8, WORDS_8[0])
    roster = RULE(words)
    assert roster is not None
    with pytest.raises(PeerError, match="twice"):
        check(Proposal(ballot=8, roster=roster, promises=words, origin=()))


def test_a_leader_cannot_count_a_promise_behind_an_earlier_vote_twice() -> None:
    words = tuple(said(peer, 5).promise for peer in (A, B, C, C))
    roster = RULE(words)
    assert roster is not None
    lie = Proposal(ballot=5, roster=roster, promises=words, origin=())
    told = (*WORDS_8[:2], said(C, 8, voted=lie).promise)
    with pytest.raises(PeerError, match="twice"):
        check(Proposal(ballot=8, roster=roster, promises=told, origin=words))


def test_a_proposal_is_judged_the_same_by_every_voter_at_any_time() -> None:
    """It carries all that is needed: a voter that has seen something else can still check it."""
    for found in (proposal(8), WITH_VOTE):
        assert found is not None
        for _ in range(2):
            check(found)


def test_with_many_members_a_proposal_shows_as_many_promises_as_fit() -> None:
    crowd = [member(peer_id(f"m{number}"), counts=False) for number in range(60)]
    parent = replace(PARENT, members=tuple(crowd))
    rule = rule_of(parent, degraded=True)
    found = Candidacy(parent=parent, degraded=True, ballot=8)
    seen = view(bitmap=bytes(8))
    for each in crowd[:30]:
        word = said(each.peer, 8, parent=parent, degraded=True, seen=seen)
        found = add_promise(found, each.peer, word, rule, bool, verify)
    asked = propose(found, rule, bool).proposal
    assert asked is not None
    assert len(asked.promises) == MOST_PROMISES
    check_proposal(asked, parent, rule, bool, verify)


def test_with_more_promises_than_a_proposal_shows_the_one_with_a_vote_is_shown() -> None:
    """Nothing changed for the first voters of an electorate of 32, and then one reports a vote."""
    parent = replace(PARENT, members=tuple(map(member, sorted(peer_id(f"m{number}") for number in range(32)))))
    *first, last = (each.peer for each in parent.members)
    rule, quorum, bitmaps = rule_of(parent), quorum_of(parent), bytes(4)
    words = [said(peer, 8, parent=parent, seen=view(0, bitmap=bitmaps)) for peer in first[: MOST_PROMISES + 2]]
    found = candidacy(8, *words, parent=parent)
    assert found.proposal is None
    news = tuple(said(peer, 5, parent=parent, seen=view(bitmap=bitmaps)).promise for peer in first[:17])
    voted = Proposal(ballot=5, roster=child_of(parent, parent.members, height=17), promises=news, origin=())
    check_proposal(voted, parent, rule, quorum, verify)
    word = said(last, 8, voted=voted, parent=parent, seen=view(bitmap=bitmaps))
    asked = propose(added(found, word, rule=rule), rule, quorum).proposal
    assert asked is not None
    assert asked.roster == voted.roster
    check_proposal(asked, parent, rule, quorum, verify)


@pytest.mark.parametrize("num_voters_here", [8])
def test_with_more_promises_than_a_proposal_shows_those_shown_are_enough(num_voters_here: int) -> None:
    """A quarter of the electorate, or of two hundred members if none of the electorate is left."""
    peers = sorted(peer_id(f"m{number}") for number in range(200))
    parent = replace(PARENT, members=tuple(member(peer, counts=place >= 168) for place, peer in enumerate(peers)))
    assert parent.voters == set(peers[168:])
    rule, bitmaps = rule_of(parent, degraded=True), bytes(25)
    here = [*peers[: 40 if num_voters_here else 60], *peers[168 : 168 + num_voters_here]]

    def quorum(some: Collection[PeerId]) -> bool:
        return is_quarter(parent, some)

    found = Candidacy(parent=parent, degraded=True, ballot=8)
    for peer in here:
        word = said(peer, 8, parent=parent, degraded=True, seen=view(bitmap=bitmaps))
        found = propose(add_promise(found, peer, word, rule, quorum, verify), rule, quorum)
    assert found.proposal is not None
    check_proposal(found.proposal, parent, rule, quorum, verify)


# -- votes and certificates


def test_a_majority_of_votes_is_a_certificate() -> None:
    open_vote = candidacy(8, said(A, 8), said(B, 8), said(C, 8))
    asked = open_vote.proposal
    assert asked is not None
    assert certificate(candidacy(8, said(A, 8)), QUORUM) is None
    for peer in (A, C):
        open_vote = add_vote(open_vote, peer, vote_of(peer, asked), verify)
        assert certificate(open_vote, QUORUM) is None
    certified = certificate(add_vote(open_vote, D, vote_of(D, asked), verify), QUORUM)
    assert certified is not None
    assert (certified.roster, certified.ballot) == (asked.roster, 8)
    assert {peer for peer, _ in certified.votes} == {A, C, D}


def test_unrelated_votes_change_nothing() -> None:
    open_vote = candidacy(8, said(A, 8), said(B, 8), said(C, 8))
    asked = open_vote.proposal
    assert asked is not None
    for begun, sender, given_vote in [
        (candidacy(8, said(A, 8)), A, vote_of(A, asked)),
        (open_vote, A, vote_of(A, replace(asked, ballot=9))),
        (open_vote, A, vote_of(A, proposal(8, height=7))),
        (open_vote, STRANGER, vote_of(STRANGER, asked)),
        (open_vote, A, replace(vote_of(A, asked), signature=NO_SIGNATURE)),
    ]:
        assert add_vote(begun, sender, given_vote, verify) is begun


def test_a_member_without_a_vote_votes_only_for_a_degraded_child() -> None:
    open_vote = candidacy(8, *(said(peer, 8, parent=FRESH) for peer in (A, B)), parent=FRESH)
    asked = open_vote.proposal
    assert asked is not None
    assert add_vote(open_vote, D, vote_of(D, asked), verify) is open_vote
    assert D in add_vote(replace(open_vote, degraded=True), D, vote_of(D, asked), verify).votes


class Election:
    """Voters with ballots on disk, leaders that come and go, messages that are lost or late.

    A leader that lies shows different voters different proposals in one ballot; each follows from some of its promises.
    """

    def __init__(self, seed: int, *, lies: bool = False) -> None:
        self.random = random.Random(seed)
        self.lies = lies
        self.peers = ids(self.random.randint(1, 6))
        self.parent = roster_of(len(self.peers))
        self.rule, self.quorum = rule_of(self.parent), quorum_of(self.parent)
        self.ballots: dict[PeerId, Ballots] = dict.fromkeys(self.peers, NO_BALLOTS)
        self.leads: list[Candidacy] = []
        self.certified: dict[int, set[Digest]] = {}
        self.on_the_way: list[tuple[int, PeerId, Promised | Vote]] = []

    def _new_lead(self) -> None:
        ballot = self.random.randint(1, 9)
        if all(lead.ballot != ballot for lead in self.leads):  # each ballot has one leader
            self.leads.append(Candidacy(parent=self.parent, degraded=False, ballot=ballot))

    def _fork(self, place: int) -> None:
        """Propose something else too, which follows from some of the promises."""
        lead = self.leads[place]
        some = {peer: word for peer, word in lead.promises.items() if self.random.random() < 0.8}
        other = propose(replace(lead, promises=some, proposal=None, votes={}), self.rule, self.quorum)
        if other.proposal is not None:
            self.leads.append(other)

    def step(self) -> None:
        """Run one phase of one ballot, old or new, with a random set of reachable members."""
        what = self.random.random()
        if what < 0.2 or not self.leads:
            self._new_lead()
        elif what < 0.4:
            while self.on_the_way and self.random.random() < 0.8:
                self._deliver()
        else:
            place = self.random.randrange(len(self.leads))
            for peer in [peer for peer in self.peers if self.random.random() < 0.6]:
                self._ask(place, peer)
            self.leads[place] = propose(self.leads[place], self.rule, self.quorum)
            if self.lies and self.leads[place].proposal is not None:
                self._fork(place)

    def _ask(self, place: int, peer: PeerId) -> None:
        """Ask a member for a promise, or for its vote once there is a proposal."""
        lead = self.leads[place]
        if lead.proposal is None:
            voted = self.ballots[peer].bond(self.parent.digest(), degraded=False).voted
            bound = promise(self.ballots[peer], self.parent.digest(), lead.ballot, degraded=False)
            seen = view(self.random.randint(0, 2))
            answer: Promised | Vote = said(peer, lead.ballot, voted=voted, seen=seen, parent=self.parent)
        else:
            check_proposal(lead.proposal, self.parent, self.rule, self.quorum, verify)
            bound = vote(self.ballots[peer], lead.proposal)
            answer = vote_of(peer, lead.proposal)
        if bound is None:
            return
        self.ballots[peer] = bound
        self.on_the_way.append((place, peer, answer))
        if self.random.random() < 0.8:
            self._deliver()

    def _deliver(self) -> None:
        place, peer, message = self.on_the_way.pop(self.random.randrange(len(self.on_the_way)))
        if self.random.random() < 0.1:
            return  # lost
        lead = self.leads[place]
        if isinstance(message, Vote):
            lead = add_vote(lead, peer, message, verify)
        else:
            lead = add_promise(lead, peer, message, self.rule, self.quorum, verify)
        self.leads[place] = lead
        certified = certificate(lead, self.quorum)
        if certified is not None:
            self.certified.setdefault(lead.ballot, set()).add(certified.roster.digest())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 62))
def test_at_most_one_child_of_a_roster_is_ever_certified(seed: int) -> None:
    election = Election(seed)
    for _ in range(40):
        election.step()
        assert len(set().union(*election.certified.values())) <= 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 62))
def test_a_leader_that_proposes_several_rosters_in_a_ballot_gets_at_most_one_certified(seed: int) -> None:
    election = Election(seed, lies=True)
    for _ in range(40):
        election.step()
        assert all(len(rosters) <= 1 for rosters in election.certified.values())


def test_some_elections_end_and_some_leaders_lie() -> None:
    ended = forked = 0
    for seed in range(40):
        election = Election(seed, lies=seed % 2 == 0)
        for _ in range(40):
            election.step()
        ended += bool(election.certified)
        rosters = {(lead.ballot, lead.proposal.roster) for lead in election.leads if lead.proposal is not None}
        forked += len(rosters) > len({ballot for ballot, _ in rosters})
    assert ended > 5
    assert forked > 5
