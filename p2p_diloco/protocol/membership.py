"""Who is here and who is a member: heartbeats in, promises, proposals, votes and certificates out.

In the last round of each cycle the members of the roster in force agree on its child (`ballot.py`). Each quarter of
that round is one lead's turn. A founder leads alone until roster 1 is certified, then counts no more.

No round goes under two rosters: who has voted for a child names no parent under the roster before it in later rounds,
so that once the child can be certified no majority is left there. While no certificate comes, ballots go on in each
quarter of every round for what has been voted for. See docs/decisions/0026-governing-rosters.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepBallots, KeepRoster, Report, Send
from p2p_diloco.protocol.attendance import Attendance, Self
from p2p_diloco.protocol.ballot import (
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
from p2p_diloco.protocol.histories import has_gone_on, has_most_members, is_better, is_left_behind, is_sound
from p2p_diloco.protocol.messages import Message, RosterReply, RosterRequest
from p2p_diloco.protocol.overlay import column_mates, hands_on_to, row_mates
from p2p_diloco.protocol.owners import IDLE_CYCLES, LOST_CYCLES, OwnerLog
from p2p_diloco.protocol.roster import (
    MOST_LEVELS,
    CertifiedRoster,
    Goodbye,
    Roster,
    Verify,
    check_child,
    lead_order,
    reducers,
    vote_statement,
)
from p2p_diloco.protocol.roster_book import RosterBook
from p2p_diloco.protocol.roster_delta import (
    CertifiedDelta,
    ProposalDelta,
    certified_delta,
    proposal_delta,
    rebuild_certified,
    rebuild_proposal,
)
from p2p_diloco.protocol.round import newcomers_of
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wish import View, wish_roster

NO_SIGNATURE = bytes(64)


class Membership(Attendance):
    """One peer's view of the swarm and its part in certifying rosters. A state machine without I/O.

    `included_total`, what rosters publish, is kept by the engine.

    Args:
        remembers: whether this peer still knows what its earlier incarnations voted. One whose disk was lost does
            not, and so has no vote on the child of a roster that lists an earlier incarnation.
    """

    def __init__(
        self,
        *,
        me: Self,
        rules: RunRules,
        book: RosterBook,
        ballots: Ballots,
        verify: Verify,
        remembers: bool,
    ) -> None:
        super().__init__(me=me, rules=rules, book=book, verify=verify)
        self.included_total = 0
        self.owners = OwnerLog(clock=rules.clock)
        self.void_cycles = 0
        self.in_force_since = 0
        self._doubted_since: float | None = None
        self.named_round = -1
        """The last round in which this peer named parents; until it does, the round in which it was started."""
        self._voted_in: tuple[Digest, int] | None = None
        """The roster whose child this peer has last voted for, and the round of its first such vote."""
        self._ballots = ballots
        self._candidacy: Candidacy | None = None
        self._remembers = remembers

    def is_hub(self) -> bool:
        """Tell whether no member can be dialled, so that all go through this peer, which holds the state for them."""
        roster = self.book.in_force
        return roster is not None and roster.k > 0 and roster.hub() == self.me.peer

    def _stands_in(self, parent: Roster) -> bool:
        """Tell whether this peer is the helper, no member itself, where some member can be dialled, or could once."""
        return parent.helper == self.me.peer and parent.hub() is None and parent.member(self.me.peer) is None

    def say_goodbye(self) -> Goodbye:
        """Leave: from now on this incarnation neither leads nor votes, and names no parent.

        Its word counts as a promise not to vote in rounds before the last one in which it named parents: whoever quotes
        it does without its vote, and must not agree on a child that governs such a round.
        """
        self.leaving = True
        parent = self.book.in_force
        digest = parent.digest() if parent is not None else ZERO_DIGEST
        bond = self._ballots.bond(digest, 0)
        unsigned = Goodbye(
            run=self.rules.run,
            peer=self.me.peer,
            incarnation=self.me.incarnation,
            parent=digest,
            k=parent.k if parent is not None else 0,
            promised=max(bond.promised, ballot_number(self.named_round, 0)) if self.named_round >= 0 else bond.promised,
            voted=bond.voted is not None,
            signature=NO_SIGNATURE,
        )
        word = replace(unsigned, signature=self.me.sign(unsigned.statement()))
        self.take_goodbye(word)
        return word

    # -- the chain of rosters

    def take_rosters(self, rosters: tuple[CertifiedRoster, ...], now: float, *, is_own: bool = False) -> list[Action]:
        """Add rosters in chain order; report what is now in force, and a branch that was given up.

        Args:
            is_own: this peer led the ballot, and saw the votes come.
        """
        before = self.book.in_force
        actions: list[Action] = []
        for place, certified in enumerate(rosters):
            try:
                wins = None if is_own else self._weigh(rosters[place:], now)
                if self.book.add(certified, wins=wins):
                    actions.append(KeepRoster(certified=certified))
            except PeerError as error:
                actions.append(Report(topic="roster-refused", text=str(error)))
                break
        after = self.book.in_force
        if after is not None and after is not before:
            self._enter(before, after, now, actions)
        return actions

    def is_better(self, roster: Roster, cycle: int) -> bool | None:
        """Tell whether a roster ends a better line than the one in force; None where that is told by seniority."""
        parting = self.book.parting(roster.parent, self.rules.void_cycles + 2)
        if parting is None or not parting[1] or roster.digest() in self.book:
            return None
        begin, ours, theirs = parting
        return is_better(begin, ours, [*theirs, roster], cycle, self.rules.void_cycles)

    def _weigh(self, line: Sequence[CertifiedRoster], now: float) -> bool | None:
        """Tell whether the first roster of a line must be in force; raises PeerError for one not even to be kept."""
        certified = line[0]
        roster, mine = certified.roster, self.book.in_force
        current, cycle = self.rules.clock.round_at(now), self.rules.clock.cycle(self.rules.clock.round_at(now))
        ahead = ballot_turn(certified.ballot)[0] - current
        member = mine.member(self.me.peer) if mine is not None else None
        if ahead > 1 and member is not None and member.incarnation == self.me.incarnation:
            raise PeerError(f"roster {roster.k} was voted for {ahead} rounds from now; at most one is allowed")
        if mine is not None and roster.parent == self.book.in_force_digest and roster.level > self.level():
            self._doubt(line, mine, now)
        parting = self.book.parting(roster.parent, self.rules.void_cycles + 2)
        is_new = roster.digest() not in self.book
        if is_new and parting is not None and is_sound(parting[0], parting[1], cycle, self.rules.void_cycles):
            raise PeerError(f"roster {roster.k} is of another line than the one here, which went on with a majority")
        went_on = is_new and parting is not None and has_gone_on(parting[0], parting[1], self.rules.void_cycles)
        if mine is not None and roster.level and went_on:
            self._doubt(line, mine, now)
        return self.is_better(roster, cycle)

    def _doubt(self, line: Sequence[CertifiedRoster], mine: Roster, now: float) -> None:
        """Raise PeerError for a degraded roster, unless this peer has seen no entries and most members have gone on.

        One member's vote is enough for such a roster, so it is in force only where somebody is stalled too, or comes
        back to a swarm that went on without it. Who comes back looks twice: one liar may be the first to be heard.
        Where more than half of all members go by the line that it begins, no majority is left under ours.
        """
        roster, clock, here = line[0].roster, self.rules.clock, self.alive(now)
        digests = {certified.roster.digest() for certified in line}
        if has_most_members(mine, (peer for peer, beat in here.items() if beat.roster in digests)):
            return
        is_idle = self._latest_part < clock.round_at(now) - 2 * clock.num_fragments
        since = self._doubted_since
        self._doubted_since = (now if since is None else since) if is_idle else None
        has_waited = is_idle and since is not None and now - since >= self.rules.silence_seconds
        if has_waited and is_left_behind(mine, list(here.values()), self.book):
            return
        raise PeerError(
            f"roster {roster.k} has no majority of roster {mine.k} behind it, only level {roster.level}; it counts for "
            f"those who have been without entries for so long: this peer is at level {self.level()}"
        )

    def ask_rosters(self, to: PeerId, now: float) -> Send:
        """Ask a peer whose roster is not known here for what we lack."""
        return Send(to=to, message=RosterRequest(known=self.book.landmarks()), deadline=self._soon(now))

    def ask_certificate(self, to: PeerId, digest: Digest, now: float) -> Send:
        """Ask a peer for its certificate of a roster that is known here: it may hold an earlier one."""
        parent = self.book.folded[digest][0].parent
        return Send(to=to, message=RosterRequest(known=(parent,)), deadline=self._soon(now))

    def spread(self, certified: CertifiedRoster, to: Collection[PeerId], deadline: float) -> list[Action]:
        """Send a certified roster: to members of its parent as a difference, whole to others.

        A member that does not know the parent after all asks for what it lacks (`rebuilt`).
        """
        parent, words = self.book.parent_of(certified.roster), dict[PeerId, Message]()
        if parent is not None and (delta := certified_delta(certified, parent)) is not None:
            words = dict.fromkeys(parent.peers(), delta)
        whole = RosterReply(rosters=(certified,))
        return [Send(to=peer, message=words.get(peer, whole), deadline=deadline) for peer in sorted(to)]

    def rebuilt(
        self, sender: PeerId, word: ProposalDelta | CertifiedDelta, now: float
    ) -> Proposal | CertifiedRoster | Action:
        """Return what a difference stands for; or what is to be done where its parent is not known or it is wrong."""
        known = self.book.folded.get(word.delta.rest.parent)
        if known is None:
            return self.ask_rosters(sender, now)
        parent, _ = known
        try:
            if isinstance(word, ProposalDelta):
                return rebuild_proposal(word, parent)
            return rebuild_certified(word, parent)
        except PeerError as error:
            name = short_peer_id(sender)
            return Report(topic="roster-refused", text=f"{name} handed on a difference that does not hold: {error}")

    def _enter(self, before: Roster | None, after: Roster, now: float, actions: list[Action]) -> None:
        self.void_cycles = 0
        self._candidacy = None
        self.in_force_since = self.rules.clock.round_at(now)
        is_other_branch = before is not None and not self.book.is_on_chain(before.digest())
        counted = 0 if is_other_branch else self.included_total
        self.included_total = max(counted, after.included_total)
        self._forget_strangers(after, now)
        names = ", ".join(short_peer_id(member.peer) for member in after.members)
        degraded = f"; degraded, epoch {after.epoch}" if after.is_degraded() else ""
        text = f"roster {after.k}: {len(after.members)} members ({names}){degraded}"
        actions.append(Report(topic="roster", text=text))
        if is_other_branch:
            was = f"epoch {before.epoch}" if before is not None else "nothing"
            text = f"roster {after.k} of another branch, epoch {after.epoch}, wins over {was}; adopting its state"
            actions.append(Report(topic="branch", text=text))

    def _forget_strangers(self, roster: Roster, now: float) -> None:
        """Drop what is kept of peers that are neither members nor here, so that nothing grows for ever."""
        long_ago = now - 4 * self.rules.silence_seconds
        members = roster.peers()
        self.heard = {p: heard for p, heard in self.heard.items() if p in members or heard.at > long_ago}
        self._goodbyes = {key: w for key, w in self._goodbyes.items() if key[0] in members or key[0] in self.heard}
        self.took_part = {peer: last for peer, last in self.took_part.items() if peer in members}

    # -- certifying the next one

    def tick(self, now: float) -> list[Action]:
        """Promise to the lead whose turn it is, and lead when it is ours."""
        parent = self.book.in_force
        round_index = self.rules.clock.round_at(now)
        if parent is None or round_index < 0:
            return []
        if not self._is_voting_round(parent, round_index) and not self._is_overdue(parent, round_index):
            return []
        turn = self.rules.clock.lead_turn(round_index, now)
        ballot = ballot_number(round_index, turn)
        lead = self._leads(parent, round_index)[turn]
        actions = self._promise(parent, ballot, lead, now)
        if lead == self.me.peer and not self.leaving:
            actions += self._lead(parent, ballot, now)
        return actions

    def _leads(self, parent: Roster, round_index: int) -> tuple[PeerId, ...]:
        """Return who leads in each turn; in a grid of several rows only reducers see all of it."""
        _, grid = self.book.folded[parent.digest()]
        return lead_order(parent, round_index, grid.reducers() if len(grid.rows) > 1 else frozenset())

    def _may_lead(self, parent: Roster) -> frozenset[PeerId]:
        """Return the members that have turns before the helper's."""
        _, grid = self.book.folded[parent.digest()]
        return grid.reducers() if len(grid.rows) > 1 else frozenset(reducers(parent))

    def _is_voting_round(self, parent: Roster, round_index: int) -> bool:
        clock = self.rules.clock
        # A founder may certify roster 1 in the very cycle of the founding; who is ready by then begins together.
        return clock.is_last_of_cycle(round_index) and (parent.k == 0 or clock.cycle(round_index) > parent.cycle)

    def _is_overdue(self, parent: Roster, round_index: int) -> bool:
        """Tell whether members promise on after the voting round, so that a vote whose certificate was lost comes true.

        All do, by their own clocks, whether they have voted or not: those who have may be too few.
        """
        has_voted = self._ballots.bond(parent.digest(), self.level()).voted is not None
        return has_voted or (parent.k > 0 and self.rules.clock.cycle(round_index) > parent.cycle + 1)

    def may_name_parents(self, roster: Digest, round_index: int) -> bool:
        """Tell whether this peer may name parents under a roster: not in the rounds after its vote for a child."""
        if self.leaving:
            return False
        return self._voted_in is None or self._voted_in[0] != roster or round_index <= self._voted_in[1]

    def promised_round(self) -> int:
        """Return the round of the latest ballot that this peer has promised to; -1 for none."""
        promised = max((bond.promised for bond in self._ballots.bonds), default=0)
        return ballot_turn(promised)[0] if promised else -1

    def level(self) -> int:
        """Return how far this peer is willing to go below a majority, after so many void cycles sat through awake.

        Never where the roster in force has one member: that one is a majority, however long it has waited for others.
        """
        roster = self.book.in_force
        if roster is not None and len(roster.members) == 1 and not self.has_left(roster.members[0]):
            return 0
        level, wait = 0, self.rules.void_cycles
        left = self.void_cycles
        while left >= wait and level < MOST_LEVELS:
            left -= wait
            level += 1
            wait = self.rules.void_cycles * 2**level
        return level

    def _may_vote(self, parent: Roster) -> bool:
        member = parent.member(self.me.peer)
        if member is None or self.leaving or not (self._remembers or member.incarnation == self.me.incarnation):
            return False
        return self.level() > 0 or not self.has_left(member)

    def _promise(self, parent: Roster, ballot: int, lead: PeerId, now: float) -> list[Action]:
        digest, level = parent.digest(), self.level()
        if self._ballots.bond(digest, level).promised >= ballot or not self._may_vote(parent):
            return []
        bound = promise(self._ballots, digest, level, ballot)
        assert bound is not None, "a higher ballot can be promised"
        self._ballots = bound
        voted = bound.bond(digest, level).voted
        unsigned = Promise(parent=digest, level=level, ballot=ballot, voted=voted, signature=NO_SIGNATURE)
        word = replace(unsigned, signature=self.me.sign(unsigned.statement()))
        actions: list[Action] = [KeepBallots(ballots=bound)]
        if lead == self.me.peer:
            return actions + self.take_promise(self.me.peer, word, now)
        return [*actions, Send(to=lead, message=word, deadline=self._soon(now))]

    def _lead(self, parent: Roster, ballot: int, now: float) -> list[Action]:
        # A helper that stands in counts no void cycles: its candidacy has the level of the first promise that comes.
        if not self._stands_in(parent) and (self._candidacy is None or self._candidacy.ballot != ballot):
            self._candidacy = Candidacy(parent=parent, level=self.level(), ballot=ballot, rules=self.rules)
        return self._propose_when_enough(now)

    def _propose_when_enough(self, now: float) -> list[Action]:
        candidacy = self._candidacy
        if candidacy is None or candidacy.proposal is not None:
            return []
        view = self._view(candidacy.level, now)
        is_voting_round = self._is_voting_round(candidacy.parent, ballot_turn(candidacy.ballot)[0])
        wish = wish_roster(candidacy, view) if is_voting_round else None
        if self._stands_in(candidacy.parent) and self._is_led(candidacy.parent, now):
            return []  # whoever can be dialled sees more
        self._candidacy = propose(candidacy, wish, self.me.sign)
        proposal = self._candidacy.proposal
        if proposal is None:
            return []
        actions = self._hand_on(proposal, candidacy.parent, self._first_to_hear(candidacy.parent, now), now)
        return actions + self.take_proposal(self.me.peer, proposal, now)

    def _is_led(self, parent: Roster, now: float) -> bool:
        """Tell whether a member that has turns before the helper's is ready, and on no other line."""
        here, may_lead = self.alive(now), self._may_lead(parent)
        return any(beat.ready and self.book.is_on_chain(beat.roster) for p, beat in here.items() if p in may_lead)

    def _hand_on(self, proposal: Proposal, parent: Roster, to: Collection[PeerId], now: float) -> list[Action]:
        """Send a proposal to members of the roster in force; whoever could vote for it knows its parent."""
        word = proposal_delta(proposal, parent)
        return [Send(to=peer, message=word, deadline=self._soon(now)) for peer in sorted(to)]

    def _lead_of(self, parent: Roster, ballot: int, now: float) -> PeerId | None:
        """Return whose ballot this is; None for one that is not near the present, which would bind us for long."""
        round_index, turn = ballot_turn(ballot)
        if round_index < 0 or abs(round_index - self.rules.clock.round_at(now)) > 1:
            return None
        return self._leads(parent, round_index)[turn]

    def _first_to_hear(self, parent: Roster, now: float) -> frozenset[PeerId]:
        """Return whom a word for all members of the roster in force goes to first; in a grid they hand it on.

        In a grid it goes to all members that are heard here, too: the reducers that would hand it on may be dead, and
        members of other rows, linked because no roster comes about, may be all who can vote.
        """
        _, grid = self.book.folded[parent.digest()]
        if len(grid.rows) == 1 or self._stands_in(parent):
            return parent.peers() - {self.me.peer}
        heard = parent.peers() & self.alive(now).keys()
        return row_mates(grid, self.me.peer) | column_mates(grid, self.me.peer) | heard

    def take_promise(self, sender: PeerId, word: Promise, now: float) -> list[Action]:
        """Count a promise made to us; propose once they are enough."""
        parent = self.book.in_force
        if parent is None or word.parent != parent.digest():
            return self._tell_child(sender, word.parent, now)
        if self._lead_of(parent, word.ballot, now) != self.me.peer or self.leaving:
            return []
        candidacy, is_stand_in = self._candidacy, self._stands_in(parent)
        if candidacy is None or candidacy.ballot < word.ballot or (candidacy.level != word.level and not is_stand_in):
            if word.level != self.level() and not is_stand_in:
                return []
            candidacy = Candidacy(parent=parent, level=word.level, ballot=word.ballot, rules=self.rules)
        candidacy = add_promise(candidacy, sender, word, self._verify)
        if sender not in candidacy.promises and is_stand_in:
            return []  # a stranger must not choose the level
        self._candidacy = candidacy
        return self._propose_when_enough(now)

    def _tell_child(self, sender: PeerId, parent: Digest, now: float) -> list[Action]:
        """Send what follows a roster to a member of it that promises for it still: the certificate was lost."""
        if not self.book.is_on_chain(parent) or sender not in self.book.folded[parent][0].peers():
            return []
        return [Send(to=sender, message=RosterReply(rosters=self.book.after((parent,))), deadline=self._soon(now))]

    def take_proposal(self, sender: PeerId, proposal: Proposal, now: float) -> list[Action]:
        """Vote for a proposal of the lead of its ballot, when what we have promised allows it; hand it on in a grid."""
        parent = self.book.in_force
        roster = proposal.roster
        if parent is None or roster.parent != parent.digest():
            return []
        lead = self._lead_of(parent, proposal.ballot, now)
        if lead is None or not self._verify(lead, proposal.statement(), proposal.signature):
            return []
        to = hands_on_to(self.book.folded[roster.parent][1], sender, self.me.peer)
        handed_on = self._hand_on(proposal, parent, to, now) if to else []
        return [*handed_on, *self._vote(lead, parent, proposal, now)]

    def _vote(self, lead: PeerId, parent: Roster, proposal: Proposal, now: float) -> list[Action]:
        roster = proposal.roster
        ballot_round, _ = ballot_turn(proposal.ballot)
        if not self._may_vote(parent) or roster.level > self.level() or ballot_round < self.named_round:
            return []  # were it certified, it would govern a round in which this peer has named parents under another
        if not self._is_voting_round(parent, ballot_round) and not self._is_overdue(parent, ballot_round):
            return []  # a vote silences, and nobody would promise on before the voting round
        if roster.cycle > self.rules.clock.cycle(self.rules.clock.round_at(now) + 1):
            return []
        try:
            check_child(roster, parent, proposal.ballot, self._verify, self.rules)
        except PeerError as error:
            return [Report(topic="proposal-refused", text=str(error))]
        if not all(map(self.rules.may_be_member, roster.peers())):
            text = f"roster {roster.k} names a peer that the manifest does not list"
            return [Report(topic="proposal-refused", text=text)]
        bound = vote(self._ballots, proposal)
        if bound is None:
            return []
        self._ballots = bound
        if self._voted_in is None or self._voted_in[0] != roster.parent:
            self._voted_in = (roster.parent, ballot_round)
        digest = roster.digest()
        signature = self.me.sign(vote_statement(digest, proposal.ballot))
        word = Vote(parent=roster.parent, roster=digest, ballot=proposal.ballot, signature=signature)
        actions: list[Action] = [KeepBallots(ballots=bound)]
        if lead == self.me.peer:
            return actions + self.take_vote(lead, word, now)
        return [*actions, Send(to=lead, message=word, deadline=self._soon(now))]

    def take_vote(self, sender: PeerId, word: Vote, now: float) -> list[Action]:
        """Count a vote for our proposal; spread the certificate once they are enough."""
        if self._candidacy is None:
            return []
        self._candidacy = add_vote(self._candidacy, sender, word, self._verify)
        certified = certificate(self._candidacy)
        if certified is None:
            return []
        to = (self._first_to_hear(self._candidacy.parent, now) | self.alive(now).keys()) - {self.me.peer}
        return [*self.take_rosters((certified,), now, is_own=True), *self.spread(certified, to, self._soon(now))]

    def _view(self, level: int, now: float) -> View:
        """Return what this lead sees; below a majority only whom it hears itself, for all look for links by then.

        Were members of silent rows kept then, all reducers of the next grid could be dead, and nobody would lead it.
        """
        parent = self.book.in_force
        return View(
            lead=self.me.peer,
            present=self._here(now) if level else self.present(now),
            took_part=self.took_part,
            newcomers=newcomers_of(parent, self.book.parent_of(parent)) if parent is not None else (),
            goodbyes=self._goodbyes.values(),
            clock=self.rules.clock,
            round=self.rules.clock.round_at(now),
            in_force_since=self.in_force_since,
            included_total=self.included_total,
            lost=self.owners.lost(),
            is_helper_here=parent is not None and self._is_here(parent.helper, now),
            heard_since={peer: heard.since for peer, heard in self.heard.items()},
            now=now,
        )

    def _is_here(self, peer: PeerId | None, now: float) -> bool:
        return peer == self.me.peer or peer in self.alive(now)

    def round_over(self, round_index: int) -> list[Action]:
        """Draw from a round that is over who of the owners gets no entries; only who follows the logs can tell."""
        governing = self.book.governing(round_index)
        if not self.ready or governing is None:
            self.owners.forget()
            return []
        num_spans = self.rules.num_spans[self.rules.clock.fragment(round_index)]
        return [
            Report(
                topic="reducer-lost",
                text=f"the spans of {short_peer_id(peer)} got no entries for {IDLE_CYCLES} cycles while others' did; "
                f"it averages nothing for {LOST_CYCLES} cycles",
            )
            for peer in self.owners.round_over(round_index, num_spans, *governing)
        ]

    def _soon(self, now: float) -> float:
        return now + self.rules.clock.round_seconds
