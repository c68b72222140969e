"""Attendance: heartbeats and declarations that this peer received, and how often entries name each member.

The next roster follows from it; see `membership.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.membership.proposal import is_outdated
from p2p_diloco.protocol.membership.reach_proofs import proofs_to_declare
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import FULL_SHARE, Declaration, Member, ReachProof
from p2p_diloco.protocol.wire.roster import Verify

MOST_HEARD = 4096
"""Maximum number of peers whose messages are kept, apart from members: strangers must not crowd them out."""
CYCLES_SEEN = 8
COUNTS_AFTER_CYCLES = 4
"""A member counts when entries of this many of the last eight cycles since its listing include its contributions."""
NO_SIGNATURE = bytes(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPeer:
    """This peer, as the rules see it.

    Attributes:
        can_be_dialled: what is known at its start.
        sign: signs with its key.
        archives: whether it follows the logs although it does not train, to keep what the run has learnt.
    """

    peer: PeerId
    incarnation: int
    can_be_dialled: bool
    trains: bool
    sign: Callable[[bytes], bytes]
    archives: bool = False

    def member(self, share: int = FULL_SHARE) -> Member:
        """Return this incarnation as the member that founds a run."""
        return Member(peer=self.peer, incarnation=self.incarnation, trains=self.trains, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """The latest heartbeat of a peer, when it arrived, and the start of the time in which the peer was never silent."""

    heartbeat: Heartbeat
    at: float
    since: float


class Attendance:
    """One peer's view of which peers are present. A state machine without I/O.

    `share` is the share of averaging that this peer's line can carry, `can_be_dialled` whether others have proved it
    reachable, and `proofs` what they signed about that, newest first. The shell updates all three.
    """

    def __init__(self, *, me: LocalPeer, rules: RunRules, book: RosterBook, verify: Verify) -> None:
        self.me = me
        self.rules = rules
        self.book = book
        self.heard: dict[PeerId, PeerView] = {}
        self.present_in: dict[PeerId, int] = {}
        """Per member, the round of the last entry for which it was present."""
        self.share = FULL_SHARE
        self.can_be_dialled = me.can_be_dialled
        self.proofs: tuple[ReachProof, ...] = ()
        self.ready = False
        self.leaving = False
        self.is_paused = False
        """Whether this peer's owner has paused it: it follows the run and votes, but trains, averages and serves
        nothing. The shell sets this; heartbeats and declarations tell the others."""
        self.declared: dict[PeerId, Declaration] = {}
        """The newest declaration of each peer."""
        self._verify = verify
        self._included_in: dict[PeerId, tuple[int, int]] = {}
        """Per member, a cycle, and a bit for it and each of the seven before: whether entries include the member."""
        self._entries_of: dict[int, int] = {}
        """Per recent round, its number of entries."""

    # -- heartbeats

    def take_heartbeat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Receive a heartbeat; return False if it is ignored, such as one that is old or not signed by its peer."""
        known = self.heard.get(heartbeat.peer)
        if known is None and len(self.heard) >= MOST_HEARD and not self._is_listed(heartbeat.peer):
            return False
        if known is not None and self._is_older(heartbeat, known, now):
            return False
        if heartbeat.run != self.rules.run or not self._verify(
            heartbeat.peer, heartbeat.statement(), heartbeat.signature
        ):
            return False
        since = known.since if known is not None and now - known.at <= self.rules.silence_seconds else now
        self.heard[heartbeat.peer] = PeerView(heartbeat=heartbeat, at=now, since=since)
        return True

    def _is_older(self, heartbeat: Heartbeat, known: PeerView, now: float) -> bool:
        """Return whether a heartbeat is older than the last one that its peer sent.

        Incarnations that start on a new disk are numbered by the clock. If the clock was far ahead once, the next such
        incarnation has a smaller number. Its heartbeats count once the greater one is silent, unless the roster still
        lists another incarnation: that one cannot return and must be dropped, so the peer stays silent until then.
        """
        last, roster = known.heartbeat, self.book.in_force
        if heartbeat.incarnation < last.incarnation and now - known.at > self.rules.silence_seconds:
            member = roster.member(heartbeat.peer) if roster is not None else None
            return member is not None and member.incarnation != heartbeat.incarnation
        return (heartbeat.incarnation, heartbeat.sequence) <= (last.incarnation, last.sequence)

    def alive(self, now: float) -> dict[PeerId, Heartbeat]:
        """Return the latest heartbeats of peers that are not silent and have not declared that they leave."""
        earliest = now - self.rules.silence_seconds
        left = {peer for peer, word in self.declared.items() if word.leaving}
        return {
            peer: heard.heartbeat
            for peer, heard in self.heard.items()
            if heard.at >= earliest and (peer not in left or not self.has_left(peer, heard.heartbeat.incarnation))
        }

    def num_ready(self, now: float) -> int:
        """Return how many peers that train are alive and ready, this one included.

        In a grid of several rows, all members are assumed to be. Two members that can only dial out never receive each
        other's heartbeats; the entries show whether such a member is present.
        """
        grid, roster = self.book.grid(), self.book.in_force
        if grid is not None and roster is not None and len(grid.rows) > 1:
            return sum(member.trains for member in roster.members)
        here = {peer for peer, beat in self.alive(now).items() if beat.ready and beat.trains}
        if self.ready and self.me.trains and not (self.leaving or self.is_paused):
            here.add(self.me.peer)
        return len(here | self._unheard_in_entries(now))

    def _unheard_in_entries(self, now: float) -> frozenset[PeerId]:
        """Return the members that never sent a heartbeat here but were present for an entry of the last cycle."""
        roster, clock = self.book.in_force, self.rules.clock
        members = frozenset(m.peer for m in roster.members if m.trains) if roster is not None else frozenset()
        since = clock.round_at(now) - clock.num_fragments
        unheard = members - self.heard.keys() - {self.me.peer}
        return frozenset(peer for peer in unheard if self.present_in.get(peer, -1) >= max(since, 0))

    def may_be_member(self, peer: PeerId) -> bool:
        """Return whether the organiser lets `peer` take part; the founder always may."""
        return self.rules.may_be_member(peer) or (self.book.in_force is not None and peer == self.book.founder)

    def _is_listed(self, peer: PeerId) -> bool:
        roster = self.book.in_force
        return roster is not None and roster.member(peer) is not None

    # -- declarations

    def declare(self, now: float, *, leaving: bool = False) -> Declaration:
        """Return this peer's declaration about itself, signed."""
        unsigned = Declaration(
            run=self.rules.run,
            peer=self.me.peer,
            incarnation=self.me.incarnation,
            cycle=max(self.rules.clock.cycle(self.rules.clock.round_at(now)), 0),
            proofs=self._shown_proofs(),
            trains=self.me.trains,
            share=max(self.share, 1),
            leaving=leaving,
            signature=NO_SIGNATURE,
        )
        word = replace(unsigned, signature=self.me.sign(unsigned.statement()))
        self.declared[self.me.peer] = word
        return word

    def _shown_proofs(self) -> tuple[ReachProof, ...]:
        roster = self.book.in_force
        if roster is None or not self.can_be_dialled or self.is_paused:
            return ()
        return proofs_to_declare(self.proofs, self.me.peer, roster, self.book.founder)

    def take_declaration(self, word: Declaration, cycle: int) -> bool:
        """Note a declaration; return False if it is not new, outdated, of a future cycle, or not signed by its peer."""
        known = self.declared.get(word.peer)
        is_full = known is None and len(self.declared) >= MOST_HEARD and not self._is_listed(word.peer)
        if is_full or word.run != self.rules.run or word.peer == self.me.peer or word.cycle > cycle + 1:
            return False
        if not self.may_be_member(word.peer) or self._is_outdated(word, cycle):
            return False
        if known is not None and known.age() >= word.age():
            return False
        if not word.is_signed(self._verify):
            return False
        self.declared[word.peer] = word
        return True

    def forget_old_declarations(self, cycle: int) -> None:
        """Drop declarations that are outdated in this cycle."""
        if any(self._is_outdated(word, cycle) for word in self.declared.values()):
            self.declared = {p: word for p, word in self.declared.items() if not self._is_outdated(word, cycle)}

    def _is_outdated(self, word: Declaration, cycle: int) -> bool:
        roster = self.book.in_force
        return roster is not None and is_outdated(word, roster, cycle)

    def has_left(self, peer: PeerId, incarnation: int) -> bool:
        """Return whether that incarnation of a peer has declared that it leaves."""
        word = self.declared.get(peer)
        return word is not None and word.leaving and word.incarnation >= incarnation

    # -- what the entries show

    def note_entry(self, present: Iterable[PeerId], included: Iterable[PeerId], round_index: int) -> None:
        """Note the members that were present for an entry of a round, and those whose contributions it includes."""
        cycle = self.rules.clock.cycle(round_index)
        for peer in present:
            self.present_in[peer] = max(round_index, self.present_in.get(peer, -1))
        for peer in included:
            last, bits = self._included_in.get(peer, (cycle, 0))
            if cycle >= last:
                bits, last = bits << min(cycle - last, CYCLES_SEEN), cycle
                bits |= 1
            elif last - cycle < CYCLES_SEEN:
                bits |= 1 << (last - cycle)
            self._included_in[peer] = (last, bits & ((1 << CYCLES_SEEN) - 1))
        self._entries_of[round_index] = self._entries_of.get(round_index, 0) + 1
        while len(self._entries_of) > self.rules.absence_rounds + 4:
            del self._entries_of[min(self._entries_of)]

    def num_entries(self, first: int, last: int) -> int:
        """Return how many entries the rounds from `first` to `last` got, as far as this peer knows."""
        return sum(num for index, num in self._entries_of.items() if first <= index <= last)

    def has_come_to_count(self, member: Member, cycle: int) -> bool:
        """Return whether entries have included a member for long enough, since its listing, to make it count."""
        last, bits = self._included_in.get(member.peer, (cycle, 0))
        cycles = (last - place for place in range(CYCLES_SEEN) if bits >> place & 1)
        return sum(max(member.since, cycle - CYCLES_SEEN) < each <= cycle for each in cycles) >= COUNTS_AFTER_CYCLES
