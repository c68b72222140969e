"""Balloting: this peer's part in certifying the next roster, as a voter and as a leader.

In the last round of each cycle the electorate of the roster in force promises to that round's leaders, and reports what
it has observed. If that changes something, a child is agreed on (`wire/ballot.py`); otherwise nothing is certified. A
member that leaves, or a vote whose certificate is lost, leads to a ballot at any time.

No round is governed by two rosters: a peer that has voted for a child names no parents under the old roster in the
rounds that the child may govern, so the old roster has no majority left in them. See
docs/decisions/agreement.md.
"""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepBallots, Report, Send, sends
from p2p_diloco.protocol.grid import column_mates, row_mates
from p2p_diloco.protocol.membership.proposal import next_roster
from p2p_diloco.protocol.membership.rosters import Observations, Rosters
from p2p_diloco.protocol.wire.ballot import (
    Candidacy,
    Prepare,
    Promise,
    Promised,
    Proposal,
    Rule,
    Vote,
    add_promise,
    add_vote,
    certificate,
    check_proposal,
    propose,
)
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, check_child, lead_order, vote_statement


class Balloting:
    """Promises, proposes, votes and certifies. A state machine without I/O.

    A ballot is: `Prepare` if none is due, `Promised`, `Proposal`, `Vote`, and the certificate. What this peer sends to
    itself as its own leader is taken at once.
    """

    def __init__(self, seen: Observations, rosters: Rosters) -> None:
        self._seen = seen
        self._rosters = rosters
        self._rules = seen.local.rules
        self._book = seen.local.book
        self._verify = seen.local.verify
        self._candidacies: dict[bool, Candidacy] = {}
        """For ordinary and degraded children, the last ballot that this peer led; over if its parent is."""
        self._prepared = 0
        self._checked: list[Proposal] = []
        """Proposals shown by voters that were checked: all voters show the same one."""

    def tick(self, now: float) -> list[Action]:
        """Promise to the leader whose turn it is, and lead if the turn is this peer's."""
        parent, clock = self._book.in_force, self._rules.clock
        if parent is None or clock.round_at(now) < 0:
            return []
        ballot = clock.ballot_at(now)
        actions: list[Action] = []
        if self._is_vote_due(parent, ballot) or self._seen.votes.has_voted(parent):
            actions += self._promise(parent, ballot, now, degraded=False)
        if self._seen.stall.continues():
            actions += self._promise(parent, ballot, now, degraded=True)
        has_left = self._seen.declarations.has_left
        if self._seen.votes.has_voted(parent) or any(has_left(m.peer, m.incarnation) for m in parent.members):
            actions += self.prepare_if_leader(parent, now)
        return actions

    def _is_vote_due(self, parent: Roster, ballot: int) -> bool:
        clock = self._rules.clock
        # A founder may certify roster 1 in the cycle of the founding, so that all peers ready by then begin together.
        return clock.ends_cycle(ballot) and (parent.k == 0 or clock.cycle(clock.ballot_round(ballot)) > parent.cycle)

    # -- what the parent allows

    def _may_vote(self, parent: Roster, *, degraded: bool) -> bool:
        if not self._seen.votes.knows_its_own(parent):
            return False
        return self._seen.stall.continues() if degraded else self._seen.local.peer in parent.voters

    def _rule(self, parent: Roster, *, degraded: bool) -> Rule:
        founder, before = self._book.founder, self._book.parent_of(parent)
        return lambda promises: next_roster(parent, promises, self._rules, founder, before=before, degraded=degraded)

    def _leader(self, parent: Roster, ballot: int, now: float, *, degraded: bool) -> PeerId | None:
        """Return the leader of a ballot; None if it is not near the present, as a promise would bind us for long."""
        clock = self._rules.clock
        if ballot < 1 or abs(clock.ballot_round(ballot) - clock.round_at(now)) > 1:
            return None
        order = lead_order(parent, clock.ballot_round(ballot), self._book.founder, degraded=degraded)
        return order[clock.lead_turn(ballot)]

    # -- promises

    def prepare_if_leader(self, parent: Roster, now: float) -> list[Action]:
        """Request promises from the electorate, once in each turn of this peer."""
        clock, me = self._rules.clock, self._seen.local.peer
        ballot = clock.ballot_at(now)
        if self._prepared >= ballot or self._leader(parent, ballot, now, degraded=False) != me:
            return []
        self._prepared = ballot
        prepare = Prepare(parent=parent.digest(), degraded=False, ballot=ballot)
        requests = sends(parent.voters - {me}, prepare, clock.soon(now))
        return [*requests, *self._promise(parent, ballot, now, degraded=False)]

    def take_prepare(self, sender: PeerId, prepare: Prepare, now: float) -> list[Action]:
        """Promise to a leader that requests it in its turn."""
        parent = self._book.in_force
        if parent is None or prepare.parent != parent.digest() or prepare.degraded:
            return []
        if prepare.ballot > self._rules.clock.ballot_at(now) + 1:
            return []  # by another clock the next turn may have begun; a later one would block those before it
        if self._leader(parent, prepare.ballot, now, degraded=False) != sender:
            return []
        return self._promise(parent, prepare.ballot, now, degraded=False)

    def _promise(self, parent: Roster, ballot: int, now: float, *, degraded: bool) -> list[Action]:
        bond = self._seen.votes.bond(parent, degraded=degraded)
        if bond.promised >= ballot or not self._may_vote(parent, degraded=degraded):
            return []
        actions: list[Action] = [KeepBallots(ballots=self._seen.votes.promise(parent, ballot, degraded=degraded))]
        me = self._seen.local.me
        unsigned = Promise(
            parent=parent.digest(),
            degraded=degraded,
            ballot=ballot,
            voted=(bond.voted.ballot, bond.voted.roster.digest()) if bond.voted is not None else None,
            view=self._seen.presence.view(parent, now),
            voter=me.peer,
            signature=NO_SIGNATURE,
        )
        signed = replace(unsigned, signature=me.sign(unsigned.statement()))
        promised = Promised(promise=signed, voted=bond.voted)
        leader = self._leader(parent, ballot, now, degraded=degraded)
        if leader == me.peer:
            return actions + self.take_promise(me.peer, promised, now)
        if leader is not None:
            actions.append(Send(to=leader, message=promised, deadline=self._rules.clock.soon(now)))
        return actions

    def take_promise(self, sender: PeerId, promised: Promised, now: float) -> list[Action]:
        """Count a promise made to this peer; propose once there are enough."""
        parent, me, clock = self._book.in_force, self._seen.local.peer, self._rules.clock
        promise, voted, degraded = promised.promise, promised.voted, promised.promise.degraded
        if parent is None or promise.parent != parent.digest():
            return self._send_child(sender, promise.parent, now)
        if self._leader(parent, promise.ballot, now, degraded=degraded) != me:
            return []
        if degraded and not self._seen.stall.continues() and parent.member(me) is not None:
            return []
        candidacy = self._candidacies.get(degraded)
        if candidacy is None or candidacy.ballot < promise.ballot or not self._is_open(candidacy):
            candidacy = Candidacy(parent=parent, degraded=degraded, ballot=promise.ballot)
        rule, quorum = self._rule(parent, degraded=degraded), self._seen.stall.quorum(parent, degraded=degraded)
        try:
            candidacy = add_promise(candidacy, sender, promised, rule, quorum, self._verify, self._checked)
        except PeerError as error:
            return [Report(topic="promise-refused", text=str(error))]
        if voted is not None and voted not in self._checked:
            self._checked = [*self._checked[-1:], voted]
        for declaration in promise.view.declarations:
            self._seen.declarations.take(declaration, clock.cycle_at(now))
        had_proposed = candidacy.proposal is not None
        self._candidacies[degraded] = candidacy = propose(candidacy, rule, quorum)
        actions = self.prepare_if_leader(parent, now) if voted is not None and not degraded else []
        if candidacy.proposal is None or had_proposed:
            return actions
        able = parent.peers() if degraded else parent.voters
        actions += sends(able - {me}, candidacy.proposal, clock.soon(now))
        return actions + self.take_proposal(me, candidacy.proposal, now)

    def _is_open(self, candidacy: Candidacy) -> bool:
        return candidacy.parent.digest() == self._book.in_force_digest

    def _send_child(self, sender: PeerId, parent: Digest, now: float) -> list[Action]:
        """Send the rosters after `parent` to a member that still makes promises under it: the certificate was lost."""
        if not self._book.is_on_chain(parent) or sender not in self._book.roster(parent).peers():
            return []
        reply = RosterReply(rosters=self._book.after((parent,)))
        return [Send(to=sender, message=reply, deadline=self._rules.clock.soon(now))]

    # -- votes

    def take_proposal(self, sender: PeerId, proposal: Proposal, now: float) -> list[Action]:
        """Vote for a proposal of the leader of its ballot, if this peer's promises allow it."""
        parent, roster, me = self._book.in_force, proposal.roster, self._seen.local.me
        degraded = roster.degraded
        if parent is None or roster.parent != parent.digest():
            return []
        if self._leader(parent, proposal.ballot, now, degraded=degraded) != sender:
            return []
        if not self._may_vote(parent, degraded=degraded) or not self._seen.votes.may_vote_in(proposal.ballot):
            return []
        try:
            check_child(roster, parent, proposal.ballot, self._rules)
            rule, quorum = self._rule(parent, degraded=degraded), self._seen.stall.quorum(parent, degraded=degraded)
            check_proposal(proposal, parent, rule, quorum, self._verify)
        except PeerError as error:
            return [Report(topic="proposal-refused", text=f"{short_peer_id(sender)}: {error}")]
        bound = self._seen.votes.vote(proposal)
        if bound is None:
            return []
        digest = roster.digest()
        signature = me.sign(vote_statement(digest, proposal.ballot))
        vote = Vote(parent=roster.parent, roster=digest, ballot=proposal.ballot, signature=signature)
        actions: list[Action] = [KeepBallots(ballots=bound)]
        if sender == me.peer:
            return actions + self.take_vote(sender, vote, now)
        return [*actions, Send(to=sender, message=vote, deadline=self._rules.clock.soon(now))]

    def take_vote(self, sender: PeerId, vote: Vote, now: float) -> list[Action]:
        """Count a vote for this peer's proposal; send out the certificate once there are enough."""
        for degraded, candidacy in list(self._candidacies.items()):
            with_vote = add_vote(candidacy, sender, vote, self._verify) if self._is_open(candidacy) else candidacy
            if with_vote is candidacy:
                continue
            self._candidacies[degraded] = with_vote
            certified = certificate(with_vote, self._seen.stall.quorum(candidacy.parent, degraded=degraded))
            if certified is not None:
                actions = self._rosters.take((certified,), now, is_own=True)
                return actions + self.spread(certified, candidacy.parent, now)
        return []

    def spread(self, certified: CertifiedRoster, parent: Roster, now: float) -> list[Action]:
        """Send a certified roster to the voters, this peer's row and column, and all peers with live heartbeats."""
        clock, me = self._rules.clock, self._seen.local.peer
        _, grid = self._book.folded(parent.digest(), clock.round_at(now))
        to = parent.voters | row_mates(grid, me) | column_mates(grid, me) | self._seen.liveness.alive(now).keys()
        return [*sends(to - {me}, RosterReply(rosters=(certified,)), clock.soon(now))]
