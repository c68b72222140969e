"""Agreement on the members of a run: promises, proposals, votes and certificates of rosters.

In the last round of each cycle the electorate of the roster in force promises to that round's leaders, and reports what
it has observed. If that changes something, a child is agreed on (`ballot.py`); otherwise nothing is certified. A member
that leaves, or a vote whose certificate is lost, leads to a ballot at any time.

No round is governed by two rosters: a peer that has voted for a child names no parents under the old roster in the
rounds that the child may govern, so the old roster has no majority left in them. See
docs/decisions/0026-governing-rosters.md and 0044-ballots-have-their-own-clock.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, sha256, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepBallots, KeepLiveliness, KeepRoster, Report, Send
from p2p_diloco.protocol.membership.attendance import NO_SIGNATURE, Attendance, LocalPeer
from p2p_diloco.protocol.membership.histories import LIVELY_CYCLES, Liveliness, is_left_behind, is_left_by_all, strength
from p2p_diloco.protocol.membership.owners import IDLE_CYCLES, LOST_CYCLES, OwnerLog
from p2p_diloco.protocol.membership.proposal import FRESH_CYCLES, SHARE_STEP, is_bootstrap_needed, next_roster
from p2p_diloco.protocol.membership.reach_proofs import ReachJudge
from p2p_diloco.protocol.membership.returns import Returns
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.rules import ABSENT_CYCLES, RunRules
from p2p_diloco.protocol.wire.ballot import (
    MOST_DECLARATION_BYTES,
    MOST_DECLARATIONS,
    Ballots,
    Candidacy,
    Prepare,
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
    declarations_bytes,
    promise,
    propose,
    vote,
)
from p2p_diloco.protocol.wire.entry import pack_included
from p2p_diloco.protocol.wire.grid import column_mates, row_mates
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import Declaration, Member
from p2p_diloco.protocol.wire.messages import RosterReply, RosterRequest
from p2p_diloco.protocol.wire.roster import (
    CertifiedRoster,
    Roster,
    Verify,
    check_certificate,
    check_child,
    is_majority,
    is_quarter,
    lead_order,
    vote_statement,
)
from p2p_diloco.rate import counted

PATIENT_STALLS = 4
"""After this many stalls in a row, the remaining members may continue, however few they are."""
MOST_APPLICATIONS = MOST_DECLARATIONS // 2
"""Maximum number of applications in one promise: applicants must not crowd out members that leave or have changed."""
MOST_FORWARDED = 32
"""Maximum number of peers that are not listed whose declarations are forwarded in a cycle."""
MOST_SIGNERS_SHOWN = 4
MOST_REFUSED = 16
"""Number of refused rosters to remember, so that each is reported once."""
MOST_NAMED = 16
"""Maximum number of members that a sentence names."""
MOST_VOTES = 64
"""Number of parents for which a peer remembers that it voted for a child: many more than a few rounds can have."""
LEAVE_SECONDS = 8.0
"""Maximum time that a leaving peer stays until a roster without it governs."""


class Membership(Attendance):
    """One peer's view of the swarm and its part in certifying rosters. A state machine without I/O.

    Args:
        remembers: whether this peer still knows the votes of its earlier incarnations. A peer that lost its disk does
            not, so it has no vote on the child of a roster that lists an earlier incarnation.
        linked: peers to which messages can be sent now; shared with the engine, which updates it.
    """

    def __init__(
        self,
        *,
        me: LocalPeer,
        rules: RunRules,
        book: RosterBook,
        ballots: Ballots,
        verify: Verify,
        remembers: bool,
        linked: Collection[PeerId] = frozenset(),
    ) -> None:
        super().__init__(me=me, rules=rules, book=book, verify=verify)
        self._linked = linked
        self._forwarded: set[tuple[PeerId, bool, bool]] = set()
        self._forwarded_in = -1
        self.owners = OwnerLog(clock=rules.clock)
        self.returns = Returns()
        self.cycles_without_entries = 0
        self.in_force_since = 0
        self.height = 0
        """Total number of entries that all spans here have absorbed; updated by the engine."""
        self.named_round = -1
        """The last round in which this peer named parents; until it does, the round in which it was started."""
        self._votes: dict[Digest, int] = {}
        """For each of the last parents for whose child this peer voted, the last round before the child may govern, by
        the first vote."""
        self._ballots = ballots
        self._candidacies: dict[bool, Candidacy] = {}
        self._prepared = 0
        self._remembers = remembers
        self._has_reported_forgotten = False
        self._is_renumbered = False
        self._doubted_since: float | None = None
        self._signed_rosters: Mapping[PeerId, tuple[Digest, float]] = {}
        """Per voter without a link, the roster that it signed as the one in force, and when; updated by `Repair`."""
        self._ticked_at, self._listens_since = -math.inf, math.inf
        self._lively: Liveliness | None = None
        self._kept: Liveliness | None = None
        self._leaves_at: float | None = None
        self._has_refused: list[Digest] = []
        self._checked: list[Proposal] = []
        """Proposals shown by voters that were checked: all voters show the same one."""
        self.own_steps = 0
        """Inner steps of this peer so far; updated by the engine."""
        self._steps: dict[PeerId, int] = {}

    # -- coming and going

    def leave(self, now: float) -> Declaration:
        """Leave: from now on this peer names no parents, and stays only to vote for a roster without it."""
        self.ready, self.leaving, self._leaves_at = False, True, now + LEAVE_SECONDS
        return self.declare(now, leaving=True)

    def may_go(self, now: float) -> bool:
        """Return whether the others no longer need this leaving peer: its vote, and the spans that it averages."""
        governing = self.book.governing(self.rules.clock.round_at(now))
        rosters = (self.book.in_force, governing[0] if governing is not None else None)
        is_listed = any(roster is not None and roster.member(self.me.peer) is not None for roster in rosters)
        return not is_listed or self._leaves_at is None or now >= self._leaves_at

    def is_needed(self) -> bool:
        """Return whether this peer, which founded the run and does not train, is needed on the roster."""
        roster = self.book.in_force
        if roster is None or self.me.trains or self.book.founder != self.me.peer:
            return False
        return is_bootstrap_needed(member for member in roster.members if member.trains)

    def declaration(self, now: float) -> Declaration | None:
        """Return this peer's declaration if it would change the roster in force, otherwise None."""
        roster = self.book.in_force
        if roster is None or not (self.ready or self.leaving):
            return None
        if not self.me.trains and roster.member(self.me.peer) is None and not self.is_needed():
            return None
        word = self.declare(now, leaving=self.leaving)
        return word if self._is_news(word, roster, now) else None

    def pass_on(self, word: Declaration, sender: PeerId, now: float) -> list[Action]:
        """Note a peer's declaration, and forward it to the voters if the peer sent it itself.

        Declarations of third peers are accepted only from members and the founder. Otherwise a stranger could invent
        any number of applicants, and a genuine one would hardly ever be among the few that are listed in a cycle.
        """
        roster = self.book.in_force
        if roster is None or not (sender in (word.peer, self.book.founder) or self._is_listed(sender)):
            return []
        if not self.take_declaration(word, self.rules.clock.cycle(self.rules.clock.round_at(now))):
            return []
        actions: list[Action] = []
        if sender == word.peer and self._is_news(word, roster, now) and self._may_forward(word, now):
            to = roster.voters - {self.me.peer, word.peer}
            actions += [Send(to=peer, message=word, deadline=self._soon(now)) for peer in sorted(to)]
        if word.leaving and roster.member(word.peer) is not None:
            name = short_peer_id(word.peer)
            actions.append(Report(topic="good-bye", text=f"{name} leaves"))
            actions += self._prepare_if_leader(roster, now)
        return actions

    def _may_forward(self, word: Declaration, now: float) -> bool:
        """Count a declaration of another peer; return whether to forward it: one of each kind and peer in a cycle.

        A peer can sign any number of them, with ever later incarnations, and others would run out of their budgets for
        what this peer sends.
        """
        cycle = self.rules.clock.cycle(self.rules.clock.round_at(now))
        if cycle != self._forwarded_in:
            self._forwarded_in, self._forwarded = cycle, set()
        key = (word.peer, word.leaving, bool(word.proofs))
        strangers = {peer for peer, *_ in self._forwarded if not self._is_listed(peer)} - {word.peer}
        if key in self._forwarded or (not self._is_listed(word.peer) and len(strangers) >= MOST_FORWARDED):
            return False
        self._forwarded.add(key)
        return True

    def _is_news(self, word: Declaration, roster: Roster, now: float) -> bool:
        """Return whether a declaration would change the roster in force."""
        member = roster.member(word.peer)
        cycle = self.rules.clock.cycle(self.rules.clock.round_at(now))
        if member is None:
            return not word.leaving
        if word.incarnation < member.incarnation:
            return False
        if word.leaving:
            return True
        if word.cycle < cycle - FRESH_CYCLES:
            return False
        if word.incarnation > member.incarnation:
            return True
        if member.trains and self._is_reachable(word, roster, cycle) != member.reduces:
            return True
        return member.reduces and abs(word.share - member.share) >= SHARE_STEP

    def _is_reachable(self, word: Declaration, roster: Roster, cycle: int) -> bool:
        judge = ReachJudge(parent=roster, rules=self.rules, founder=self.book.founder, cycle=cycle)
        return judge.is_reachable(word)

    def audible_voters(self) -> frozenset[PeerId]:
        """Return the other voters that this peer can have a link to; if there are none, all other such members."""
        others, voters = self._audible()
        return others & voters or others

    def clocks(self, now: float) -> frozenset[PeerId]:
        """Return the peers whose clocks count here: the other members that this peer can have a link to.

        For a joiner, only those with live heartbeats count. Voters alone are not enough: a run begins with one, and a
        peer that slept or was restarted needs others to ask. If this peer cannot be sure of a link to any member, those
        with live heartbeats count, as in one home, if with this peer they are more than half of all members: a single
        one may lie. Otherwise the founder's clock counts, because peers that cannot reach each other need a common one.
        """
        others, _ = self._audible()
        roster, me = self.book.in_force, self.me.peer
        if roster is None:
            return others
        alive = self.alive(now).keys()
        here = roster.peers() & (alive | {me})
        if not others and 2 * len(here) > len(roster.members):
            others = here - {me}
        if not others and me != self.book.founder:
            return frozenset((self.book.founder,))
        return others if self._is_listed(me) else (others & alive or others)

    def hears_hub(self, clocks: frozenset[PeerId]) -> bool:
        """Return whether the only clock that counts is of a peer with links to members that this one cannot link to."""
        roster, me = self.book.in_force, self.me.peer
        if roster is None or len(clocks) != 1 or len(roster.peers() | clocks) <= 2 or me == self.book.founder:
            return False
        hubs = {self.book.founder, *(member.peer for member in roster.members if member.reduces)}
        return me not in hubs and clocks <= hubs

    def _audible(self) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        roster = self.book.in_force
        if roster is None:
            return frozenset(), frozenset()
        others = (m.peer for m in roster.members if m.peer != self.me.peer and (self.can_be_dialled or m.reduces))
        return frozenset(others), roster.voters

    # -- the chain of rosters

    def take_rosters(self, rosters: tuple[CertifiedRoster, ...], now: float, *, is_own: bool = False) -> list[Action]:
        """Add rosters in chain order; report the one that is now in force, and a branch that was given up.

        Args:
            is_own: whether this peer led the ballot, and so received the votes itself.
        """
        before = self.book.in_force
        actions: list[Action] = []
        for certified in rosters:
            if certified.roster.k and certified.roster.parent not in self.book:
                break  # a joiner, or a peer that was away, may receive the newest first; that breaks no rule
            try:
                wins = None if is_own else self._weigh(certified, now)
                is_next = certified.roster.parent == self.book.in_force_digest
                parting = self.book.parting(certified.roster.parent)
                if self.book.add(certified, wins=wins):
                    # The earlier rosters of a line that wins are in memory alone.
                    line = [*(parting[2] if parting is not None else ()), certified]
                    is_in_force = self.book.is_on_chain(certified.roster.digest())
                    learnt = line if is_in_force else [certified]
                    actions += [KeepRoster(certified=each, is_in_force=is_in_force) for each in learnt]
                    actions += self._forgotten(certified) if is_next else []
            except PeerError as error:
                actions += self._refused(certified, str(error))
                break
        after = self.book.in_force
        if after is not None and after is not before:
            self._enter(before, after, now, actions)
        return actions

    def _forgotten(self, certified: CertifiedRoster) -> list[Action]:
        """Report, once, that a child of the roster in force has a vote of this peer that is not on its disk.

        Votes are written to disk before they are sent. A peer that lost its disk already knows that votes are missing.
        """
        roster = certified.roster
        voted = self._ballots.bond(roster.parent, degraded=roster.degraded).voted
        is_kept = voted is not None and voted.ballot >= certified.ballot
        has_voted = any(peer == self.me.peer for peer, _ in certified.votes)
        if self._has_reported_forgotten or not self._remembers or not has_voted or is_kept:
            return []
        self._has_reported_forgotten = True
        text = (
            f"roster {roster.k} carries a vote of this peer that its state directory does not hold: either the "
            "directory was restored from a backup (nothing to do), or another process uses a copy of it (stop one of "
            "them, and give it its own state directory)"
        )
        return [Report(topic="identity", text=text)]

    def _refused(self, certified: CertifiedRoster, reason: str) -> list[Action]:
        """Report a refused roster, once: peers that follow it send it again and again."""
        digest = certified.roster.digest()
        if digest in self._has_refused:
            return []
        self._has_refused = [*self._has_refused[1 - MOST_REFUSED :], digest]
        return [Report(topic="roster-refused", text=reason)]

    def is_better(self, certified: CertifiedRoster, cycle: int) -> bool | None:
        """Return whether a roster ends a better line than the one in force; None if the lines do not part."""
        roster = certified.roster
        parting = self.book.parting(roster.parent)
        if parting is None or roster.digest() in self.book or roster.parent == self.book.in_force_digest:
            return None
        begin, ours, theirs = parting
        line = [*theirs, certified]
        if self._is_lively(ours, line, cycle):
            return False
        return strength(begin, line, cycle) > strength(begin, ours, cycle)

    def _is_lively(self, ours: Sequence[CertifiedRoster], theirs: Sequence[CertifiedRoster], cycle: int) -> bool:
        """Return whether our line has kept a majority since before the other one began, as observed here.

        If a majority certified the other line too, it comes from former voters or a lying leader; a lie shows at once.
        A line that ends with a roster of a later cycle does not go on: who certified it had a clock that was ahead.
        """
        if self._lively is None or not self._lively.goes_on(cycle) or any(each.roster.degraded for each in ours):
            return False
        if ours[-1].roster.cycle > cycle + LIVELY_CYCLES:
            return False
        first, begun = self._lively.first, ours[0].roster.cycle
        if any(each.roster.degraded for each in theirs):
            return first <= theirs[0].roster.cycle
        return begun <= cycle - LIVELY_CYCLES and first <= begun + LIVELY_CYCLES

    def _weigh(self, certified: CertifiedRoster, now: float) -> bool | None:
        """Return whether a roster must be put in force; raise PeerError if it must not even be kept."""
        roster, mine, clock = certified.roster, self.book.in_force, self.rules.clock
        current = clock.round_at(now)
        cycle = clock.cycle(current)
        ahead = clock.ballot_round(certified.ballot) - current
        member = mine.member(self.me.peer) if mine is not None else None
        if ahead > 1 and member is not None and member.incarnation == self.me.incarnation:
            raise PeerError(f"roster {roster.k} was voted for {ahead} rounds from now; at most one is allowed")
        is_child = mine is not None and roster.parent == self.book.in_force_digest
        if mine is not None and roster.degraded and roster.digest() not in self.book and is_child:
            self._doubt(certified, mine, now)
        return self.is_better(certified, cycle)

    def _doubt(self, certified: CertifiedRoster, mine: Roster, now: float) -> None:
        """Raise PeerError for a degraded child of ours, unless this peer is stalled too or most others have moved on.

        One member's vote can be enough for such a roster. A peer that returns to a swarm that continued without it
        checks twice, because the first message may come from a liar. Most others are more than half of the members with
        live heartbeats, or of the electorate. That much of the electorate could have certified an ordinary child, and
        it keeps members that all wait from holding each other back for ever.
        """
        check_certificate(certified, mine, self._verify, self.rules)
        roster, voters = certified.roster, [peer for peer, _ in certified.votes]
        has_quorum = self._quorum(mine, degraded=True)(voters)
        if self._has_seen_a_stall(mine) and has_quorum and self._may_be_honest(roster, mine, voters, now):
            return
        clock = self.rules.clock
        last = max(self.present_in.values(), default=-1)
        is_idle = last < clock.round_at(now) - 2 * clock.num_fragments
        since = self._doubted_since
        self._doubted_since = (now if since is None else since) if is_idle else None
        beats = list(self.alive(now).values())
        named = self._named_of_late(beats, now)
        is_alive = is_majority(mine, [peer for peer, known in named if known in self.book])
        have_voters_gone = is_majority(mine, [peer for peer, unknown in named if unknown not in self.book])
        is_left = have_voters_gone or is_left_behind(mine, beats, self.book)
        if is_idle and not is_alive and since is not None and is_left:
            # If a member follows a roster that is known here, its entries, or those that it names, get time to arrive.
            seconds = self.rules.silence_seconds
            if not is_left_by_all(mine, beats, self.book):
                seconds = max(seconds, self.rules.stalled_cycles * self.rules.cycle_seconds)
            if now - since >= seconds:
                return
        names = ", ".join(map(short_peer_id, sorted(voters)[:MOST_SIGNERS_SHOWN]))
        raise PeerError(
            f"roster {roster.k}, signed by {names}, has no majority of roster {roster.k - 1}; only stalled peers take "
            f"it, after {self.rules.stalled_cycles} cycles without entries; this peer had {self.cycles_without_entries}"
        )

    def _may_be_honest(self, roster: Roster, mine: Roster, signers: Collection[PeerId], now: float) -> bool:
        """Return whether those who signed a degraded child of ours may have done so in good faith.

        Members that do not vote continue alone only if nobody who can vote is there. Of voters that were started anew
        nobody knows whether they remember their votes, so they hold back the others only until the stall is long. A
        child that omits this peer is in doubt while another voter waits here too, or if who signed it was linked to
        this peer in the whole stall and so knows that it is there; who slept, or was cut off, may have missed it. Peers
        that have lost the state hold back nobody: they could do so for ever.
        """
        beats = {peer: beat for peer, beat in self.alive(now).items() if beat.ready}
        if not self.ready:
            return True
        able = {
            member.peer
            for peer, beat in beats.items()
            if (member := mine.member(peer)) is not None and member.incarnation == beat.incarnation
        }
        if self._knows_its_votes(mine):
            able.add(self.me.peer)
        able &= mine.voters
        here = mine.voters & {self.me.peer, *beats}
        if (able or (here and not self._is_patient())) and not mine.voters.intersection(signers):
            return False
        if self.leaving or mine.member(self.me.peer) is None or roster.member(self.me.peer) is not None:
            return True
        waiting = {peer for peer, beat in beats.items() if beat.roster == self.book.in_force_digest}
        since = now - self.rules.stalled_cycles * self.rules.cycle_seconds
        knew = any(peer in self._linked and peer in beats and self.heard[peer].since <= since for peer in signers)
        return not knew and not able & waiting - set(signers)

    def ask_rosters(self, to: PeerId, now: float) -> Send:
        """Return a request to a peer, whose roster is not known here, for the rosters that this peer lacks."""
        return Send(to=to, message=RosterRequest(known=self.book.landmarks()), deadline=self._soon(now))

    def ask_certificate(self, to: PeerId, digest: Digest, now: float) -> Send:
        """Return a request for a peer's certificate of a roster that is known here: it may hold an earlier one."""
        parent = self.book.roster(digest).parent
        return Send(to=to, message=RosterRequest(known=(parent,)), deadline=self._soon(now))

    def _enter(self, before: Roster | None, after: Roster, now: float, actions: list[Action]) -> None:
        self.cycles_without_entries = 0
        self._candidacies = {}
        self._doubted_since = None
        self.in_force_since = max(self.rules.clock.round_at(now), self.book.last_before(after.digest()))
        actions += self._renumbered(after)
        if before is None or after.degraded or before.peers() != after.peers():
            reasons = self._note_dropped(before, after, now) if before is not None else {}
            text = _roster_sentence(before, after, reasons, self.me.peer)
            actions.append(Report(topic="roster", text=text))
        self._forget_strangers(after, now)
        if before is not None and not self.book.is_on_chain(before.digest()):
            self._lively = None
            text = f"roster {after.k} of another branch wins over roster {before.k} here; adopting its state"
            actions.append(Report(topic="branch", text=text))

    def _note_dropped(self, before: Roster, after: Roster, now: float) -> dict[PeerId, str]:
        """Return why each member is gone, as seen from here; one that is here but too late waits before it returns."""
        clock, reasons = self.rules.clock, {}
        if not self.ready or after.parent != before.digest():
            return {}
        for peer in before.peers() - after.peers():
            member = before.member(peer)
            assert member is not None, "it was listed"
            last = max(self.present_in.get(peer, -1), member.since * clock.num_fragments)
            absent_seconds = max(clock.round_at(now) - last, 0) * clock.round_seconds
            if self.has_left(peer, member.incarnation):
                reasons[peer] = "left"
            elif not member.trains:
                reasons[peer] = "no longer needed"
            elif self._is_closed(member, now):
                reasons[peer] = "its link closed"
            else:
                reasons[peer] = f"in no entry for {absent_seconds:.0f} s"
                is_late = peer in self.alive(now) or peer == self.me.peer
                if is_late and not after.degraded:
                    listed_seconds = (after.cycle - member.since) * self.rules.cycle_seconds
                    self.returns.dropped(peer, member.incarnation, listed_seconds, now)
        return reasons

    def _renumbered(self, roster: Roster) -> list[Action]:
        """Take the next number if a roster lists a later start of this peer, so that the others accept what it sends.

        Starts on a new or restored disk are numbered by the clock, which may have been ahead at the listed one. Only
        once, because the later start may also be a process with a copy of the disk, which does the same.
        """
        member = roster.member(self.me.peer)
        if self._is_renumbered or member is None or member.incarnation <= self.me.incarnation:
            return []
        text = (
            f"roster {roster.k} lists start {member.incarnation} of this peer, but this is start "
            f"{self.me.incarnation}: either its clock was ahead then (nothing to do), or another process uses a copy "
            "of its state directory (stop one of them, and give it its own state directory)"
        )
        self._is_renumbered = True
        self.me = replace(self.me, incarnation=member.incarnation + 1)
        return [Report(topic="identity", text=text)]

    def _forget_strangers(self, roster: Roster, now: float) -> None:
        """Drop what is kept about peers that are neither members nor present, so that nothing grows for ever."""
        long_ago = now - 4 * self.rules.silence_seconds
        members = roster.peers()
        self.heard = {p: heard for p, heard in self.heard.items() if p in members or heard.at > long_ago}
        here = members | self.heard.keys() | {self.me.peer}
        self.declared = {peer: word for peer, word in self.declared.items() if peer in here}
        self.present_in = {peer: last for peer, last in self.present_in.items() if peer in members}
        self._included_in = {peer: seen for peer, seen in self._included_in.items() if peer in members}

    def entry_absorbed(self, round_index: int) -> None:
        """Note that the line in force is alive: it got an entry."""
        self._doubted_since = None
        cycle = self.rules.clock.cycle(round_index)
        before = self._lively if self._lively is not None and self._lively.goes_on(cycle) else None
        first, last = (before.first, max(cycle, before.last)) if before is not None else (cycle, cycle)
        assert self.book.in_force_digest is not None, "entries follow rosters"
        self._lively = Liveliness(roster=self.book.in_force_digest, first=first, last=last)

    def recall(self, liveliness: Liveliness) -> None:
        """Restore what this peer had observed of its line before a restart, if that line is in force."""
        if self.book.is_on_chain(liveliness.roster):
            self._lively = self._kept = liveliness

    def keep_liveliness(self) -> list[Action]:
        """Return the action that stores the liveliness of the line in force; none if it has not changed."""
        if self._lively is None or self._lively == self._kept:
            return []
        self._kept = self._lively
        return [KeepLiveliness(liveliness=self._lively)]

    # -- certifying the next one

    def tick(self, now: float) -> list[Action]:
        """Promise to the leader whose turn it is, and lead if the turn is this peer's."""
        parent = self.book.in_force
        round_index = self.rules.clock.round_at(now)
        if now - self._ticked_at > self.rules.silence_seconds:
            self._listens_since, self._doubted_since = now, None  # this peer was just started, or has slept
        self._ticked_at = now
        if parent is None or round_index < 0:
            return []
        ballot = self.rules.clock.ballot_at(now)
        actions: list[Action] = []
        self.forget_old_declarations(self.rules.clock.cycle(round_index))
        if self._is_vote_due(parent, ballot) or self._has_voted(parent):
            actions += self._promise(parent, ballot, now, degraded=False)
        if self.is_stalled():
            actions += self._promise(parent, ballot, now, degraded=True)
        if self._has_voted(parent) or any(self.has_left(m.peer, m.incarnation) for m in parent.members):
            actions += self._prepare_if_leader(parent, now)
        return actions

    def set_back(self, now: float) -> None:
        """Remove all heartbeat times that are in the future, because the clock was far ahead."""
        self._ticked_at = self._listens_since = now
        self._doubted_since = None
        self.returns = Returns()
        self.in_force_since = min(self.in_force_since, self.rules.clock.round_at(now))
        self.heard = {
            peer: replace(heard, at=min(heard.at, now), since=min(heard.since, now))
            for peer, heard in self.heard.items()
        }

    def _is_vote_due(self, parent: Roster, ballot: int) -> bool:
        clock = self.rules.clock
        # A founder may certify roster 1 in the cycle of the founding, so that all peers ready by then begin together.
        return clock.ends_cycle(ballot) and (parent.k == 0 or clock.cycle(clock.ballot_round(ballot)) > parent.cycle)

    def _has_voted(self, parent: Roster) -> bool:
        return self._ballots.bond(parent.digest(), degraded=False).voted is not None

    def may_name_parents(self, roster: Digest, round_index: int) -> bool:
        """Return whether this peer may name parents under a roster: not in the rounds after it voted for a child."""
        if self.leaving:
            return False
        return round_index <= self._votes.get(roster, round_index)

    def promised_round(self) -> int:
        """Return the round of the latest ballot that this peer has promised; -1 if there is none."""
        promised = max((bond.promised for bond in self._ballots.bonds), default=0)
        return self.rules.clock.ballot_round(promised) if promised else -1

    def is_stalled(self) -> bool:
        """Return whether this peer continues without a majority, after too many cycles without an entry while awake.

        Never if the roster in force has one member: that one is a majority, however long it has waited for others. The
        bootstrap peer cannot train, so it waits for an application of a peer that can.
        """
        roster = self.book.in_force
        if roster is None or self.cycles_without_entries < self.rules.stalled_cycles or len(roster.members) == 1:
            return False
        return roster.member(self.me.peer) is not None and (self.me.trains or self._has_application(roster))

    def set_ready(self, ready: bool) -> None:
        """Note whether this peer holds the agreed state."""
        self.ready = ready

    def note_signed_rosters(self, rosters: Mapping[PeerId, tuple[Digest, float]]) -> None:
        """Note the rosters that voters have signed to be in force, and when each statement arrived."""
        self._signed_rosters = rosters

    @property
    def doubts(self) -> bool:
        """Return whether others follow a degraded roster that this peer has not adopted."""
        return self._doubted_since is not None

    def _named_of_late(self, beats: Sequence[Heartbeat], now: float) -> list[tuple[PeerId, Digest]]:
        """Return the rosters that others follow, by their heartbeats and recently signed statements."""
        since = now - 2 * self.rules.cycle_seconds - self.rules.silence_seconds
        signed = [(peer, roster) for peer, (roster, at) in self._signed_rosters.items() if at >= since]
        heard = [(beat.peer, beat.roster) for beat in beats]
        return [(peer, roster) for peer, roster in (*signed, *heard) if roster != ZERO_DIGEST]

    def _has_seen_a_stall(self, roster: Roster) -> bool:
        """Return whether this peer is stalled or, if it is not a member, has had no entries for as long.

        Two members that cannot reach each other may both have a link only to such a peer, which forwards rosters.
        """
        if roster.member(self.me.peer) is not None:
            return self.is_stalled()
        return self.ready and self.cycles_without_entries >= self.rules.stalled_cycles

    def are_voters_idle(self, now: float) -> bool:
        """Return whether more than half of the electorate is present and none of it has stepped since the last call.

        The first step compiles; that is no reason to continue without the rest.
        """
        roster, before = self.book.in_force, self._steps
        self._steps = {peer: beat.steps for peer, beat in self.alive(now).items()}
        self._steps[self.me.peer] = self.own_steps
        if roster is None:
            return False
        here = roster.voters & self._steps.keys()
        have_moved = any(self._steps[peer] != before.get(peer, 0) for peer in here)
        return 2 * len(here) > len(roster.voters) and not have_moved

    def _has_application(self, roster: Roster) -> bool:
        """Return whether a peer that trains wants to be listed, as a new member or with a later incarnation."""
        for word in self.declared.values():
            member = roster.member(word.peer)
            if word.trains and not word.leaving and (member is None or word.incarnation > member.incarnation):
                return True
        return False

    def _may_vote(self, parent: Roster, *, degraded: bool) -> bool:
        if not self._knows_its_votes(parent):
            return False
        return self.is_stalled() if degraded else self.me.peer in parent.voters

    def _knows_its_votes(self, parent: Roster) -> bool:
        """Return whether this peer is on a roster, and knows what the incarnation listed there has voted for."""
        member = parent.member(self.me.peer)
        return member is not None and (self._remembers or member.incarnation == self.me.incarnation)

    def _rule(self, parent: Roster, *, degraded: bool) -> Rule:
        founder, before = self.book.founder, self.book.parent_of(parent)
        return lambda promises: next_roster(parent, promises, self.rules, founder, before=before, degraded=degraded)

    def _quorum(self, parent: Roster, *, degraded: bool) -> Quorum:
        """Return the quorum for a child of `parent`; after a long stall, any members are enough."""
        if not degraded:
            return lambda peers: is_majority(parent, peers)
        is_patient = self._is_patient()
        return lambda peers: is_quarter(parent, peers) or (is_patient and not parent.peers().isdisjoint(peers))

    def _is_patient(self) -> bool:
        return self.cycles_without_entries >= PATIENT_STALLS * self.rules.stalled_cycles

    def _promise(self, parent: Roster, ballot: int, now: float, *, degraded: bool) -> list[Action]:
        digest = parent.digest()
        bond = self._ballots.bond(digest, degraded=degraded)
        if bond.promised >= ballot or not self._may_vote(parent, degraded=degraded):
            return []
        bound = promise(self._ballots, digest, ballot, degraded=degraded)
        assert bound is not None, "a higher ballot can be promised"
        self._ballots = bound
        unsigned = Promise(
            parent=digest,
            degraded=degraded,
            ballot=ballot,
            voted=(bond.voted.ballot, bond.voted.roster.digest()) if bond.voted is not None else None,
            view=self.view(parent, now),
            voter=self.me.peer,
            signature=NO_SIGNATURE,
        )
        word = Promised(promise=replace(unsigned, signature=self.me.sign(unsigned.statement())), voted=bond.voted)
        lead = self._lead_of(parent, ballot, now, degraded=degraded)
        actions: list[Action] = [KeepBallots(ballots=bound)]
        if lead == self.me.peer:
            return actions + self.take_promise(self.me.peer, word, now)
        return [*actions, Send(to=lead, message=word, deadline=self._soon(now))] if lead is not None else actions

    def _lead_of(self, parent: Roster, ballot: int, now: float, *, degraded: bool) -> PeerId | None:
        """Return the leader of a ballot; None if it is not near the present, as a promise would bind us for long."""
        clock = self.rules.clock
        if ballot < 1 or abs(clock.ballot_round(ballot) - clock.round_at(now)) > 1:
            return None
        order = lead_order(parent, clock.ballot_round(ballot), self.book.founder, degraded=degraded)
        return order[clock.lead_turn(ballot)]

    def _prepare_if_leader(self, parent: Roster, now: float) -> list[Action]:
        """Ask the electorate for promises, once in each turn of this peer."""
        ballot = self.rules.clock.ballot_at(now)
        if self._prepared >= ballot or self._lead_of(parent, ballot, now, degraded=False) != self.me.peer:
            return []
        self._prepared = ballot
        word = Prepare(parent=parent.digest(), degraded=False, ballot=ballot)
        to = sorted(parent.voters - {self.me.peer})
        sends: list[Action] = [Send(to=peer, message=word, deadline=self._soon(now)) for peer in to]
        return [*sends, *self._promise(parent, ballot, now, degraded=False)]

    def take_prepare(self, sender: PeerId, word: Prepare, now: float) -> list[Action]:
        """Promise to a leader that asks for it in its turn."""
        parent = self.book.in_force
        if parent is None or word.parent != parent.digest() or word.degraded:
            return []
        if word.ballot > self.rules.clock.ballot_at(now) + 1:
            return []  # by another clock the next turn may have begun; a later one would block those before it
        if self._lead_of(parent, word.ballot, now, degraded=False) != sender:
            return []
        return self._promise(parent, word.ballot, now, degraded=False)

    def take_promise(self, sender: PeerId, word: Promised, now: float) -> list[Action]:
        """Count a promise made to this peer; propose once there are enough."""
        parent, said = self.book.in_force, word.promise
        if parent is None or said.parent != parent.digest():
            return self._send_child(sender, said.parent, now)
        if self._lead_of(parent, said.ballot, now, degraded=said.degraded) != self.me.peer:
            return []
        if said.degraded and not self.is_stalled() and parent.member(self.me.peer) is not None:
            return []
        candidacy = self._candidacies.get(said.degraded)
        if candidacy is None or candidacy.ballot < said.ballot:
            candidacy = Candidacy(parent=parent, degraded=said.degraded, ballot=said.ballot)
        rule, quorum = self._rule(parent, degraded=said.degraded), self._quorum(parent, degraded=said.degraded)
        try:
            candidacy = add_promise(candidacy, sender, word, rule, quorum, self._verify, self._checked)
        except PeerError as error:
            return [Report(topic="promise-refused", text=str(error))]
        if word.voted is not None and word.voted not in self._checked:
            self._checked = [*self._checked[-1:], word.voted]
        cycle = self.rules.clock.cycle(self.rules.clock.round_at(now))
        for one in said.view.declarations:
            self.take_declaration(one, cycle)
        had_proposed = candidacy.proposal is not None
        self._candidacies[said.degraded] = candidacy = propose(candidacy, rule, quorum)
        actions = self._prepare_if_leader(parent, now) if word.voted is not None and not said.degraded else []
        if candidacy.proposal is None or had_proposed:
            return actions
        to = sorted((parent.peers() if said.degraded else parent.voters) - {self.me.peer})
        actions += [Send(to=peer, message=candidacy.proposal, deadline=self._soon(now)) for peer in to]
        return actions + self.take_proposal(self.me.peer, candidacy.proposal, now)

    def _send_child(self, sender: PeerId, parent: Digest, now: float) -> list[Action]:
        """Send the rosters after `parent` to a member that still makes promises under it: the certificate was lost."""
        if not self.book.is_on_chain(parent) or sender not in self.book.roster(parent).peers():
            return []
        return [Send(to=sender, message=RosterReply(rosters=self.book.after((parent,))), deadline=self._soon(now))]

    def take_proposal(self, sender: PeerId, proposal: Proposal, now: float) -> list[Action]:
        """Vote for a proposal of the leader of its ballot, if this peer's promises allow it."""
        parent, roster = self.book.in_force, proposal.roster
        if parent is None or roster.parent != parent.digest():
            return []
        if self._lead_of(parent, proposal.ballot, now, degraded=roster.degraded) != sender:
            return []
        agreed_in = self.rules.clock.agreed_in(proposal.ballot)
        if not self._may_vote(parent, degraded=roster.degraded) or agreed_in < self.named_round:
            return []  # once certified, it would govern a round in which this peer named parents under another roster
        try:
            check_child(roster, parent, proposal.ballot, self.rules)
            rule, quorum = self._rule(parent, degraded=roster.degraded), self._quorum(parent, degraded=roster.degraded)
            check_proposal(proposal, parent, rule, quorum, self._verify)
        except PeerError as error:
            return [Report(topic="proposal-refused", text=f"{short_peer_id(sender)}: {error}")]
        bound = vote(self._ballots, proposal)
        if bound is None:
            return []
        self._ballots = bound
        self._votes.setdefault(roster.parent, agreed_in)
        self._votes = dict(list(self._votes.items())[-MOST_VOTES:])
        digest = roster.digest()
        signature = self.me.sign(vote_statement(digest, proposal.ballot))
        word = Vote(parent=roster.parent, roster=digest, ballot=proposal.ballot, signature=signature)
        actions: list[Action] = [KeepBallots(ballots=bound)]
        if sender == self.me.peer:
            return actions + self.take_vote(sender, word, now)
        return [*actions, Send(to=sender, message=word, deadline=self._soon(now))]

    def take_vote(self, sender: PeerId, word: Vote, now: float) -> list[Action]:
        """Count a vote for this peer's proposal; send out the certificate once there are enough."""
        for degraded, candidacy in list(self._candidacies.items()):
            counted = add_vote(candidacy, sender, word, self._verify)
            if counted is candidacy:
                continue
            self._candidacies[degraded] = counted
            certified = certificate(counted, self._quorum(counted.parent, degraded=degraded))
            if certified is not None:
                actions = self.take_rosters((certified,), now, is_own=True)
                return actions + self.spread(certified, counted.parent, now)
        return []

    def spread(self, certified: CertifiedRoster, parent: Roster, now: float) -> list[Action]:
        """Send a certified roster to the voters, this peer's row and column, and all peers with live heartbeats."""
        _, grid = self.book.folded(parent.digest(), self.rules.clock.round_at(now))
        to = parent.voters | row_mates(grid, self.me.peer) | column_mates(grid, self.me.peer) | self.alive(now).keys()
        word = RosterReply(rosters=(certified,))
        return [Send(to=peer, message=word, deadline=self._soon(now)) for peer in sorted(to - {self.me.peer})]

    # -- what this peer has seen

    def view(self, parent: Roster, now: float) -> View:
        """Return this peer's view of the members of the roster in force."""
        clock, members = self.rules.clock, parent.members
        cycle = clock.cycle(clock.round_at(now))
        lost, here = self.owners.lost(), self.alive(now).keys() | {self.me.peer}
        absent = self._absent(parent, now)

        def bitmap(named: Iterable[PeerId]) -> bytes:
            chosen = frozenset(named)
            return pack_included({n for n, m in enumerate(members) if m.peer in chosen}, len(members))

        return View(
            absent=bitmap(absent),
            heard=bitmap(here),
            counting=bitmap(m.peer for m in members if m.trains and not m.counts and self.has_come_to_count(m, cycle)),
            idle=bitmap(m.peer for m in members if (m.peer, m.incarnation) in lost),
            height=self.height,
            declarations=self._news(parent, now),
        )

    def _news(self, parent: Roster, now: float) -> tuple[Declaration, ...]:
        """Return the declarations that would change the roster: of peers that leave, join or have changed."""
        if self.ready or self.leaving:
            self.declaration(now)

        cycle = self.rules.clock.cycle(self.rules.clock.round_at(now))

        counting = {member.peer for member in parent.members if member.counts}

        reducing = {member.peer for member in parent.members if member.reduces}

        def rank(word: Declaration) -> tuple[bool, bool, bool, bool, bytes]:
            is_hidden = not self._is_reachable(word, parent, cycle)
            is_lost = is_hidden and word.peer in reducing  # all others wait for what it averages
            order = sha256(parent.digest(), word.peer)
            return (not word.leaving, not is_lost, word.peer not in counting, is_hidden, order)

        news = sorted((word for word in self.declared.values() if self._is_news(word, parent, now)), key=rank)
        coming = [
            word
            for word in news
            if parent.member(word.peer) is None and not self.returns.wait_seconds(word.peer, word.incarnation, now)
        ]
        members = [word for word in news if parent.member(word.peer) is not None]
        applications = _as_many_as_fit(coming, MOST_APPLICATIONS, MOST_DECLARATION_BYTES // 2)
        return _as_many_as_fit([*applications, *members], MOST_DECLARATIONS, MOST_DECLARATION_BYTES)

    def _absent(self, parent: Roster, now: float) -> frozenset[PeerId]:
        """Return the members that this peer would drop: those that were present for no entry for long.

        For a member whose link was closed and not opened again, a cycle is enough, as for a killed process. If the
        spans got few entries, a member must also have sent no heartbeat for as long. If no member of a row was present,
        the row has lost its reducers, and only these are dropped.
        """
        clock = self.rules.clock
        current = clock.round_at(now)
        closed = frozenset(member.peer for member in parent.members if self._is_closed(member, now))
        patience = {
            member.peer: clock.num_fragments if member.peer in closed else self.rules.absence_rounds
            for member in parent.members
        }
        quiet = {
            member.peer: member
            for member in parent.members
            if member.peer != self.me.peer
            and max(member.since + 1, 0) * clock.num_fragments <= current - patience[member.peer]
            and self.present_in.get(member.peer, -1) < current - patience[member.peer]
        }
        first = current - clock.num_fragments
        if 2 * self.num_entries(first, current - 1) < self.rules.num_all_spans:
            return frozenset(peer for peer, member in quiet.items() if peer in closed or self._is_unheard(member, now))
        _, grid = self.book.folded(parent.digest(), current)
        silent = [row for row in grid.rows if all(self.present_in.get(peer, -1) < first for peer in row)]
        spared = frozenset(peer for row in silent for peer in row) if len(grid.rows) > 1 else frozenset()
        had_entries = self._had_entries(current)
        return frozenset(
            peer
            for peer, member in quiet.items()
            if (peer in closed or had_entries) and (member.reduces or peer not in spared)
        )

    def _had_entries(self, current: int) -> bool:
        """Return whether members had a chance to be present: after a stall, all of them were in no entry for long."""
        num = self.num_entries(current - self.rules.absence_rounds, current - 1)
        return 2 * num >= ABSENT_CYCLES * self.rules.num_all_spans

    def _should_be_heard(self, member: Member) -> bool:
        grid = self.book.grid()
        is_near = grid is not None and (len(grid.rows) == 1 or member.peer in grid.neighbours(self.me.peer))
        return is_near and (self.can_be_dialled or member.reduces)

    def _is_closed(self, member: Member, now: float) -> bool:
        """Return whether the link to a member was closed and has stayed so, as after a kill."""
        heard = self.heard.get(member.peer)
        long_ago = now - self.rules.closed_seconds
        return (
            member.peer not in self._linked
            and self._should_be_heard(member)
            and self._listens_since <= long_ago
            and heard is not None
            and heard.at < long_ago
        )

    def _is_unheard(self, member: Member, now: float) -> bool:
        """Return whether a member whose heartbeats should arrive here has sent none for long."""
        long_ago = now - self.rules.absence_rounds * self.rules.clock.round_seconds
        heard = self.heard.get(member.peer)
        is_silent = heard is None or heard.at < long_ago
        return is_silent and self._listens_since <= long_ago and self._should_be_heard(member)

    def round_over(self, round_index: int) -> list[Action]:
        """Report the owners that get no entries, after a round is over; only a peer that follows the logs can tell."""
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


def _roster_sentence(before: Roster | None, after: Roster, reasons: Mapping[PeerId, str], me: PeerId) -> str:
    """Return a sentence on new and lost members of a roster; for the first roster seen, on all of them."""
    if before is None:
        told = {"": _some([member.peer for member in after.members], {}, me)}
    else:
        told = {
            "new: ": _some(sorted(after.peers() - before.peers()), {}, me),
            "gone: ": _some(sorted(before.peers() - after.peers()), reasons, me),
        }
    named = "; ".join(word + names for word, names in told.items() if names)
    names = f" ({named})" if named else ""
    degraded = "; degraded, certified by fewer than a majority" if after.degraded else ""
    return f"roster {after.k}: {counted(len(after.members), 'member')}{names}{degraded}"


def _some(peers: Sequence[PeerId], reasons: Mapping[PeerId, str], me: PeerId) -> str:
    named = [
        f"{'this peer' if peer == me else short_peer_id(peer)}{f', {reasons[peer]}' if peer in reasons else ''}"
        for peer in peers[:MOST_NAMED]
    ]
    more = [f"{len(peers) - MOST_NAMED} more"] if len(peers) > MOST_NAMED else []
    return ("; " if reasons else ", ").join([*named, *more])


def _as_many_as_fit(words: Sequence[Declaration], most: int, most_bytes: int) -> tuple[Declaration, ...]:
    shown: list[Declaration] = []
    for word in words[:most]:
        if declarations_bytes([*shown, word]) > most_bytes:
            break
        shown.append(word)
    return tuple(shown)
