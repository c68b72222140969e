"""Single-decree Paxos among the members of a roster: at most one child, and no split vote blocks the run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_run import peer_id, sign_as, verify
from hypothesis import given, settings
from hypothesis import strategies as st
from made import NO_SIGNATURE, child_of, goodbye, ids, member, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.ballot import (
    BALLOTS_LAYOUT,
    NO_BALLOTS,
    Ballots,
    Candidacy,
    Promise,
    Proposal,
    Vote,
    add_promise,
    add_vote,
    ballot_number,
    ballot_turn,
    certificate,
    promise,
    propose,
    vote,
)
from p2p_diloco.protocol.roster import Goodbye, Roster, check_certificate, is_quotable, vote_statement
from p2p_diloco.protocol.wire import FrameReader, take_fields, to_bytes

PARENT = roster_of(3)
A, B, C = ids(3)
WISH = child_of(PARENT, PARENT.members)
OTHER = child_of(PARENT, PARENT.members, regrid=7)


def sign_it(statement: bytes) -> bytes:
    return sign_as(A, statement)


def proposal(ballot: int, roster: Roster) -> Proposal:
    unsigned = Proposal(ballot=ballot, roster=roster, signature=bytes(64))
    return replace(unsigned, signature=sign_it(unsigned.statement()))


def word(peer: PeerId, ballots: Ballots, ballot: int, parent: Roster = PARENT, level: int = 0) -> Promise:
    voted = ballots.bond(parent.digest(), level).voted
    unsigned = Promise(parent=parent.digest(), level=level, ballot=ballot, voted=voted, signature=NO_SIGNATURE)
    return replace(unsigned, signature=sign_as(peer, unsigned.statement()))


def vote_of(peer: PeerId, proposal: Proposal) -> Vote:
    digest = proposal.roster.digest()
    signature = sign_as(peer, vote_statement(digest, proposal.ballot))
    return Vote(parent=proposal.roster.parent, roster=digest, ballot=proposal.ballot, signature=signature)


def candidacy(ballot: int, *promisers: PeerId, wish: Roster | None = WISH) -> Candidacy:
    found = Candidacy(parent=PARENT, level=0, ballot=ballot)
    for peer in promisers:
        found = add_promise(found, peer, word(peer, NO_BALLOTS, ballot), verify)
    return found if wish is None else propose(found, wish, sign_it)


@given(st.integers(0, 1 << 40), st.integers(0, 3))
def test_ballots_are_numbered_by_round_and_turn(round_index: int, turn: int) -> None:
    number = ballot_number(round_index, turn)
    assert number > 0
    assert ballot_turn(number) == (round_index, turn)
    assert ballot_number(round_index + 1, 0) > number


def test_a_promise_forbids_lower_ballots() -> None:
    bound = promise(NO_BALLOTS, PARENT.digest(), 0, 8)
    assert bound is not None
    assert promise(bound, PARENT.digest(), 0, 7) is None
    assert vote(bound, proposal(7, WISH)) is None
    assert promise(bound, PARENT.digest(), 0, 8) == bound
    assert vote(bound, proposal(8, WISH)) is not None


def test_nobody_votes_for_two_rosters_in_one_ballot() -> None:
    bound = vote(NO_BALLOTS, proposal(8, WISH))
    assert bound is not None
    assert vote(bound, proposal(8, OTHER)) is None
    assert vote(bound, proposal(8, WISH)) == bound
    assert vote(bound, proposal(9, OTHER)) is not None


def test_each_level_is_a_decision_of_its_own_and_a_new_parent_forgets_the_old() -> None:
    bound = vote(NO_BALLOTS, proposal(8, WISH))
    assert bound is not None
    both = promise(bound, PARENT.digest(), 1, 3)
    assert both is not None
    assert both.bond(PARENT.digest(), 0).voted == (8, WISH)
    assert both.bond(PARENT.digest(), 1).promised == 3
    later = promise(both, WISH.digest(), 0, 9)
    assert later is not None
    assert later.bond(PARENT.digest(), 0).voted is None


def test_ballots_come_back_from_disk_as_they_went() -> None:
    bound = vote(NO_BALLOTS, proposal(8, WISH))
    assert bound is not None
    assert Ballots(**take_fields(FrameReader(to_bytes(bound, BALLOTS_LAYOUT)), BALLOTS_LAYOUT)) == bound


def test_a_lead_proposes_only_once_a_majority_has_promised() -> None:
    assert candidacy(8, A).proposal is None
    ready = candidacy(8, A, B)
    assert ready.proposal == proposal(8, WISH)
    assert propose(ready, OTHER, sign_it) is ready


def test_an_earlier_vote_is_proposed_again() -> None:
    bound = vote(NO_BALLOTS, proposal(5, OTHER))
    assert bound is not None
    heard = add_promise(candidacy(8, A, wish=None), B, word(B, bound, 8), verify)
    again = propose(heard, WISH, sign_it).proposal
    assert again is not None
    assert again.roster == OTHER


def test_promises_that_do_not_belong_change_nothing() -> None:
    begun = candidacy(8, A, wish=None)
    stranger = peer_id("stranger")
    words = [
        (B, word(B, NO_BALLOTS, 9)),
        (B, word(B, NO_BALLOTS, 8, level=1)),
        (B, word(B, NO_BALLOTS, 8, parent=WISH)),
        (stranger, word(stranger, NO_BALLOTS, 8)),
        (B, replace(word(B, NO_BALLOTS, 8), signature=NO_SIGNATURE)),
    ]
    for sender, promised in words:
        assert add_promise(begun, sender, promised, verify) is begun


@pytest.mark.parametrize(
    "voted",
    [(9, OTHER), (5, replace(OTHER, level=1)), (5, replace(OTHER, k=9)), (5, replace(OTHER, members=()))],
)
def test_nobody_can_have_a_lead_propose_nonsense(voted: tuple[int, Roster]) -> None:
    begun = candidacy(8, A, wish=None)
    unsigned = replace(word(B, NO_BALLOTS, 8), voted=voted)
    lie = replace(unsigned, signature=sign_as(B, unsigned.statement()))
    assert add_promise(begun, B, lie, verify) is begun


def test_a_majority_of_votes_is_a_certificate() -> None:
    open_vote = candidacy(8, A, B)
    proposal = open_vote.proposal
    assert proposal is not None
    assert certificate(candidacy(8, A)) is None
    one = add_vote(open_vote, A, vote_of(A, proposal), verify)
    assert certificate(one) is None
    two = add_vote(one, C, vote_of(C, proposal), verify)
    certified = certificate(two)
    assert certified is not None
    check_certificate(certified, PARENT, verify)


def test_votes_that_do_not_belong_change_nothing() -> None:
    open_vote = candidacy(8, A, B)
    proposal = open_vote.proposal
    assert proposal is not None
    stranger = peer_id("stranger")
    for begun, sender, given_vote in [
        (candidacy(8, A), A, vote_of(A, proposal)),
        (open_vote, A, vote_of(A, replace(proposal, ballot=9))),
        (open_vote, A, vote_of(A, replace(proposal, roster=OTHER))),
        (open_vote, stranger, vote_of(stranger, proposal)),
        (open_vote, A, replace(vote_of(A, proposal), signature=NO_SIGNATURE)),
    ]:
        assert add_vote(begun, sender, given_vote, verify) is begun


def test_leavers_that_voted_cannot_be_done_without() -> None:
    """Three of five certify a child, two of them leave; the two others must not certify another without them."""
    parent = roster_of(5)
    *_, dan, eve = ids(5)
    words = tuple(goodbye(peer, parent=parent, promised=1, voted=True) for peer in (dan, eve))
    wish = child_of(parent, parent.members, goodbyes=words)
    lead = Candidacy(parent=parent, level=0, ballot=9)
    for peer in (B, C):
        lead = add_promise(lead, peer, word(peer, NO_BALLOTS, 9, parent), verify)
    lead = propose(lead, wish, sign_it)
    assert lead.proposal is not None
    for peer in (B, C):
        lead = add_vote(lead, peer, vote_of(peer, lead.proposal), verify)
    certified = certificate(lead)
    assert certified is not None
    with pytest.raises(PeerError, match="whose vote may have counted already"):
        check_certificate(certified, parent, verify)


class Election:
    """Members with ballots on disk, leads that come and go, messages that are lost or late, good-byes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.peers = ids(self.random.randint(1, 6))
        self.parent = roster_of(len(self.peers))
        self.ballots: dict[PeerId, Ballots] = dict.fromkeys(self.peers, NO_BALLOTS)
        self.left: dict[PeerId, Goodbye] = {}
        self.leads: list[Candidacy] = []
        self.lead_of: dict[int, PeerId] = {}
        self.certified: set[Digest] = set()
        self.on_the_way: list[tuple[int, PeerId, Promise | Vote]] = []

    def _new_lead(self) -> None:
        ballot = self.random.randint(1, 9)
        if ballot not in self.lead_of:  # each ballot has one lead
            self.lead_of[ballot] = self.random.choice(self.peers)
            self.leads.append(Candidacy(parent=self.parent, level=0, ballot=ballot))

    def _leave(self, peer: PeerId) -> None:
        bond = self.ballots[peer].bond(self.parent.digest(), 0)
        if peer not in self.left:
            self.left[peer] = goodbye(peer, parent=self.parent, promised=bond.promised, voted=bond.voted is not None)

    def _wish(self, ballot: int) -> Roster:
        digest = self.parent.digest()
        words = tuple(w for w in self.left.values() if is_quotable(w, self.parent, digest, ballot))
        words = words if self.random.random() < 0.8 else ()
        return child_of(
            self.parent, [member(peer) for peer in self.peers], regrid=self.random.randint(0, 999), goodbyes=words
        )

    def step(self) -> None:
        """One phase of one ballot, old or new, with whom it happens to reach; or a good-bye."""
        what = self.random.random()
        if what < 0.2 or not self.leads:
            self._new_lead()
        elif what < 0.23:
            self._leave(self.random.choice(self.peers))
        elif what < 0.4:
            while self.on_the_way and self.random.random() < 0.8:
                self._deliver()
        else:
            place = self.random.randrange(len(self.leads))
            reached = [peer for peer in self.peers if self.random.random() < 0.6 and peer not in self.left]
            for peer in reached:
                self._ask(place, peer)
            self.leads[place] = propose(self.leads[place], self._wish(self.leads[place].ballot), sign_it)

    def _ask(self, place: int, peer: PeerId) -> None:
        """Ask a member for a promise, or for its vote once there is a proposal."""
        lead = self.leads[place]
        if lead.proposal is None:
            bound = promise(self.ballots[peer], self.parent.digest(), 0, lead.ballot)
            answer: Promise | Vote | None = word(peer, bound, lead.ballot, self.parent) if bound is not None else None
        else:
            bound = vote(self.ballots[peer], lead.proposal)
            answer = vote_of(peer, lead.proposal)
        if bound is None or answer is None:
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
        lead = (
            add_promise(lead, peer, message, verify)
            if isinstance(message, Promise)
            else add_vote(lead, peer, message, verify)
        )
        self.leads[place] = lead
        certified = certificate(lead)
        if certified is not None:
            check_certificate(certified, self.parent, verify)
            if not self.certified:
                for voter in sorted(lead.votes):
                    if self.random.random() < 0.6:
                        self._leave(voter)  # the worst moment to go: nobody else may know
            self.certified.add(certified.roster.digest())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 62))
def test_at_most_one_child_of_a_roster_is_ever_certified(seed: int) -> None:
    election = Election(seed)
    for _ in range(40):
        election.step()
        assert len(election.certified) <= 1


def test_some_elections_do_end() -> None:
    ended = 0
    for seed in range(40):
        election = Election(seed)
        for _ in range(40):
            election.step()
        ended += len(election.certified)
    assert ended > 5
