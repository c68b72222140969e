"""Declarations: what peers sign about themselves, which of it is news, and which of it is forwarded or shown.

A declaration is news if it would change the roster in force: its peer joins, leaves, restarts, can be reached or not
any more, or can carry another share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.membership.proposal import FRESH_CYCLES, SHARE_STEP, is_bootstrap_needed, is_outdated
from p2p_diloco.protocol.membership.reach_proofs import ReachJudge, proofs_to_declare
from p2p_diloco.protocol.wire.ballot import MOST_DECLARATION_BYTES, MOST_DECLARATIONS, declarations_bytes
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.member import Declaration, ReachProof
from p2p_diloco.protocol.wire.roster import Roster

MOST_KEPT = 4096
"""Maximum number of peers whose messages are kept, apart from members: strangers must not crowd them out."""
MOST_APPLICATIONS = MOST_DECLARATIONS // 2
"""Maximum number of applications in one promise: applicants must not crowd out members that leave or have changed."""
MOST_FORWARDED = 32
"""Maximum number of peers that are not listed whose declarations are forwarded in a cycle."""
FIRST_WAIT_SECONDS = 20.0
LONGEST_WAIT_SECONDS = 600.0
"""Longest wait. A member that was listed for as long before it was dropped waits as short as at first."""


class Declarations:
    """The newest declaration of each peer, this one included. A state machine without I/O."""

    def __init__(self, local: LocalState) -> None:
        self._local = local
        self._rules = local.rules
        self._book = local.book
        self._verify = local.verify
        self.newest: dict[PeerId, Declaration] = {}
        self.returns = Returns()
        self._forwarded: set[tuple[PeerId, bool, bool]] = set()
        self._forwarded_in = -1

    # -- this peer's own

    def declare(self, now: float) -> Declaration:
        """Return this peer's declaration about itself, signed."""
        me, conditions = self._local.me, self._local.conditions
        unsigned = Declaration(
            run=self._rules.run,
            peer=me.peer,
            incarnation=me.incarnation,
            cycle=max(self._rules.clock.cycle_at(now), 0),
            proofs=self._shown_proofs(),
            trains=me.trains,
            share=max(conditions.share, 1),
            leaving=self._local.leaving,
            signature=NO_SIGNATURE,
        )
        signed = replace(unsigned, signature=me.sign(unsigned.statement()))
        self.newest[me.peer] = signed
        return signed

    def _shown_proofs(self) -> tuple[ReachProof, ...]:
        roster, conditions = self._book.in_force, self._local.conditions
        if roster is None or not conditions.can_be_dialled or conditions.is_paused:
            return ()
        return proofs_to_declare(conditions.proofs, self._local.peer, roster, self._book.founder)

    def own_news(self, now: float) -> Declaration | None:
        """Return this peer's declaration if it would change the roster in force, otherwise None."""
        roster, local = self._book.in_force, self._local
        if roster is None or not (local.ready or local.leaving):
            return None
        if not local.me.trains and roster.member(local.peer) is None and not self.is_needed():
            return None
        declaration = self.declare(now)
        return declaration if self.is_news(declaration, roster, now) else None

    def is_needed(self) -> bool:
        """Return whether this peer, which founded the run and does not train, is needed on the roster."""
        roster = self._book.in_force
        if roster is None or self._local.me.trains or self._book.founder != self._local.peer:
            return False
        return is_bootstrap_needed(member for member in roster.members if member.trains)

    # -- those of others

    def take(self, declaration: Declaration, cycle: int) -> bool:
        """Note a declaration; return False if it is not new, outdated, of a future cycle, or not signed by its peer."""
        peer, known = declaration.peer, self.newest.get(declaration.peer)
        is_full = known is None and len(self.newest) >= MOST_KEPT and not self._book.lists(peer)
        if is_full or declaration.run != self._rules.run or peer == self._local.peer or declaration.cycle > cycle + 1:
            return False
        if not self._may_be_member(peer) or self._is_outdated(declaration, cycle):
            return False
        if known is not None and known.age() >= declaration.age():
            return False
        if not declaration.is_signed(self._verify):
            return False
        self.newest[peer] = declaration
        return True

    def _may_be_member(self, peer: PeerId) -> bool:
        """Return whether the organiser lets `peer` take part; the founder always may."""
        return self._rules.may_be_member(peer) or (self._book.in_force is not None and peer == self._book.founder)

    def _is_outdated(self, declaration: Declaration, cycle: int) -> bool:
        roster = self._book.in_force
        return roster is not None and is_outdated(declaration, roster, cycle)

    def forget_old(self, cycle: int) -> None:
        """Drop declarations that are outdated in this cycle."""
        if any(self._is_outdated(each, cycle) for each in self.newest.values()):
            self.newest = {peer: each for peer, each in self.newest.items() if not self._is_outdated(each, cycle)}

    def keep_only(self, peers: Collection[PeerId]) -> None:
        """Drop the declarations of all other peers."""
        self.newest = {peer: each for peer, each in self.newest.items() if peer in peers}

    def set_back(self) -> None:
        """Forget times, because the clock was far ahead."""
        self.returns = Returns()

    def has_left(self, peer: PeerId, incarnation: int) -> bool:
        """Return whether that incarnation of a peer has declared that it leaves."""
        declaration = self.newest.get(peer)
        return declaration is not None and declaration.leaving and declaration.incarnation >= incarnation

    def has_application(self, roster: Roster) -> bool:
        """Return whether a peer that trains wants to be listed, as a new member or with a later incarnation."""
        return any(
            each.trains
            and not each.leaving
            and ((member := roster.member(each.peer)) is None or each.incarnation > member.incarnation)
            for each in self.newest.values()
        )

    # -- what is news

    def is_news(self, declaration: Declaration, roster: Roster, now: float) -> bool:
        """Return whether a declaration would change the roster in force."""
        member = roster.member(declaration.peer)
        cycle = self._rules.clock.cycle_at(now)
        if member is None:
            return not declaration.leaving
        if declaration.incarnation < member.incarnation:
            return False
        if declaration.leaving:
            return True
        if declaration.cycle < cycle - FRESH_CYCLES:
            return False
        if declaration.incarnation > member.incarnation:
            return True
        if member.trains and self._is_reachable(declaration, roster, cycle) != member.reduces:
            return True
        return member.reduces and abs(declaration.share - member.share) >= SHARE_STEP

    def _is_reachable(self, declaration: Declaration, roster: Roster, cycle: int) -> bool:
        judge = ReachJudge(parent=roster, rules=self._rules, founder=self._book.founder, cycle=cycle)
        return judge.is_reachable(declaration)

    def may_forward(self, declaration: Declaration, now: float) -> bool:
        """Count a declaration of another peer; return whether to forward it: one of each kind and peer in a cycle.

        A peer can sign any number of them, with ever later incarnations, and others would run out of their budgets for
        what this peer sends.
        """
        cycle, lists, peer = self._rules.clock.cycle_at(now), self._book.lists, declaration.peer
        if cycle != self._forwarded_in:
            self._forwarded_in, self._forwarded = cycle, set()
        key = (peer, declaration.leaving, bool(declaration.proofs))
        strangers = {each for each, *_ in self._forwarded if not lists(each)} - {peer}
        if key in self._forwarded or (not lists(peer) and len(strangers) >= MOST_FORWARDED):
            return False
        self._forwarded.add(key)
        return True

    def shown(self, parent: Roster, now: float) -> tuple[Declaration, ...]:
        """Return the news that a promise shows: of peers that leave, join or have changed."""
        self.own_news(now)
        cycle = self._rules.clock.cycle_at(now)
        counting = {member.peer for member in parent.members if member.counts}
        reducing = {member.peer for member in parent.members if member.reduces}

        def rank(declaration: Declaration) -> tuple[bool, bool, bool, bool, bytes]:
            is_hidden = not self._is_reachable(declaration, parent, cycle)
            is_lost = is_hidden and declaration.peer in reducing  # all others wait for what it averages
            order = sha256(parent.digest(), declaration.peer)
            return (not declaration.leaving, not is_lost, declaration.peer not in counting, is_hidden, order)

        news = sorted((each for each in self.newest.values() if self.is_news(each, parent, now)), key=rank)
        members = [each for each in news if parent.member(each.peer) is not None]
        coming = [
            each
            for each in news
            if parent.member(each.peer) is None and not self.returns.wait_seconds(each.peer, each.incarnation, now)
        ]
        applications = _as_many_as_fit(coming, MOST_APPLICATIONS, MOST_DECLARATION_BYTES // 2)
        return _as_many_as_fit([*applications, *members], MOST_DECLARATIONS, MOST_DECLARATION_BYTES)


def _as_many_as_fit(declarations: Sequence[Declaration], most: int, most_bytes: int) -> tuple[Declaration, ...]:
    shown: list[Declaration] = []
    for declaration in declarations[:most]:
        if declarations_bytes([*shown, declaration]) > most_bytes:
            break
        shown.append(declaration)
    return tuple(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    incarnation: int
    seconds: float
    until: float


class Returns:
    """The members that were dropped and did not leave, each with the time that it waits before it is listed again.

    Each roster costs all members a part of a round. So a member whose line or machine is too slow for this run must not
    be listed and dropped in turn: it waits twice as long each time. A restarted peer has a new incarnation and does not
    wait.
    """

    def __init__(self) -> None:
        self._waits: dict[PeerId, _Wait] = {}

    def dropped(self, peer: PeerId, incarnation: int, listed_seconds: float, now: float) -> None:
        """Note that a member was dropped after it had been listed for so long."""
        self._waits = {p: wait for p, wait in self._waits.items() if wait.until + LONGEST_WAIT_SECONDS > now}
        last = self._waits.get(peer)
        seconds = FIRST_WAIT_SECONDS
        if last is not None and last.incarnation == incarnation and listed_seconds < LONGEST_WAIT_SECONDS:
            seconds = min(2.0 * last.seconds, LONGEST_WAIT_SECONDS)
        self._waits[peer] = _Wait(incarnation=incarnation, seconds=seconds, until=now + seconds)

    def wait_seconds(self, peer: PeerId, incarnation: int, now: float) -> float:
        """Return for how long a peer must still wait; 0 if it may be listed."""
        wait = self._waits.get(peer)
        if wait is None or wait.incarnation != incarnation:
            return 0.0
        return min(max(wait.until - now, 0.0), wait.seconds)
