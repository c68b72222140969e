"""Rosters: which certified roster this peer takes, and what changes once it is in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepLiveliness, KeepRoster, Report
from p2p_diloco.protocol.membership.declarations import Declarations
from p2p_diloco.protocol.membership.doubt import Doubt
from p2p_diloco.protocol.membership.histories import LineHistory
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.membership.presence import Presence
from p2p_diloco.protocol.membership.stall import Stall
from p2p_diloco.protocol.membership.votes import Votes
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster
from p2p_diloco.rate import counted

MOST_REFUSED = 16
"""Number of refused rosters to remember, so that each is reported once."""
MOST_NAMED = 16
"""Maximum number of members that a sentence names."""


class Rosters:
    """Takes certified rosters into the book, and begins anew under each that comes into force."""

    def __init__(
        self,
        local: LocalState,
        declarations: Declarations,
        liveness: Liveness,
        presence: Presence,
        stall: Stall,
        votes: Votes,
        doubt: Doubt,
    ) -> None:
        self._local = local
        self._declarations = declarations
        self._liveness = liveness
        self._presence = presence
        self._stall = stall
        self._votes = votes
        self._doubt = doubt
        self._rules = local.rules
        self._book = local.book
        self.history = LineHistory(self._book)
        self._refused: list[Digest] = []
        self._has_reported_forgotten = False

    def entry_absorbed(self, round_index: int) -> None:
        """Note that the line in force is alive: it got an entry."""
        self._doubt.end()
        self.history.entry_absorbed(self._rules.clock.cycle(round_index))

    def keep_liveliness(self) -> list[Action]:
        """Return the action that stores the liveliness of the line in force; none if it has not changed."""
        news = self.history.news()
        return [KeepLiveliness(liveliness=news)] if news is not None else []

    # -- taking

    def take(self, rosters: Sequence[CertifiedRoster], now: float, *, is_own: bool = False) -> list[Action]:
        """Add rosters in chain order; report the one that is now in force, and a branch that was given up.

        Args:
            is_own: whether this peer led the ballot, and so received the votes itself.
        """
        before = self._book.in_force
        actions: list[Action] = []
        for certified in rosters:
            if certified.roster.k and certified.roster.parent not in self._book:
                break  # a joiner, or a peer that was away, may receive the newest first; that breaks no rule
            try:
                actions += self._add(certified, None if is_own else self._weigh(certified, now))
            except PeerError as error:
                actions += self._refuse(certified, str(error))
                break
        after = self._book.in_force
        if after is not None and after is not before:
            actions += self._enter(before, after, now)
        return actions

    def _add(self, certified: CertifiedRoster, wins: bool | None) -> list[Action]:
        roster, book = certified.roster, self._book
        is_next = roster.parent == book.in_force_digest
        parting = book.parting(roster.parent)
        if not book.add(certified, wins=wins):
            return []
        # The earlier rosters of a line that wins are in memory alone.
        line = [*(parting[2] if parting is not None else ()), certified]
        is_in_force = book.is_on_chain(roster.digest())
        learnt = line if is_in_force else [certified]
        actions: list[Action] = [KeepRoster(certified=each, is_in_force=is_in_force) for each in learnt]
        return actions + (self._report_forgotten(certified) if is_next else [])

    def _weigh(self, certified: CertifiedRoster, now: float) -> bool | None:
        """Return whether a roster must be put in force; raise PeerError if it must not even be kept."""
        roster, mine, clock = certified.roster, self._book.in_force, self._rules.clock
        ahead = clock.ballot_round(certified.ballot) - clock.round_at(now)
        member = mine.member(self._local.peer) if mine is not None else None
        if ahead > 1 and member is not None and member.incarnation == self._local.me.incarnation:
            raise PeerError(f"roster {roster.k} was voted for {ahead} rounds from now; at most one is allowed")
        is_child = roster.parent == self._book.in_force_digest
        if mine is not None and roster.degraded and is_child and roster.digest() not in self._book:
            self._doubt.check(certified, mine, now)
        return self.history.is_better(certified, clock.cycle_at(now))

    def _report_forgotten(self, certified: CertifiedRoster) -> list[Action]:
        """Report, once, that a child of the roster in force has a vote of this peer that is not on its disk."""
        if self._has_reported_forgotten or not self._votes.has_forgotten(certified):
            return []
        self._has_reported_forgotten = True
        text = (
            f"roster {certified.roster.k} carries a vote of this peer that its state directory does not hold: either "
            "the directory was restored from a backup (nothing to do), or another process uses a copy of it (stop one "
            "of them, and give it its own state directory)"
        )
        return [Report(topic="identity", text=text)]

    def _refuse(self, certified: CertifiedRoster, reason: str) -> list[Action]:
        """Report a refused roster, once: peers that follow it send it again and again."""
        digest = certified.roster.digest()
        if digest in self._refused:
            return []
        self._refused = [*self._refused[1 - MOST_REFUSED :], digest]
        return [Report(topic="roster-refused", text=reason)]

    # -- entering

    def _enter(self, before: Roster | None, after: Roster, now: float) -> list[Action]:
        """Begin anew under the roster that is now in force."""
        self._stall.roster_entered(after, now)
        self._doubt.end()
        actions = self._local.renumber(after)
        if before is None or after.degraded or before.peers() != after.peers():
            reasons = self._note_dropped(before, after, now) if before is not None else {}
            text = _roster_sentence(before, after, reasons, self._local.peer)
            actions.append(Report(topic="roster", text=text))
        self._forget_strangers(after, now)
        if before is not None and not self._book.is_on_chain(before.digest()):
            self.history.branch_adopted()
            text = f"roster {after.k} of another branch wins over roster {before.k} here; adopting its state"
            actions.append(Report(topic="branch", text=text))
        return actions

    def _note_dropped(self, before: Roster, after: Roster, now: float) -> dict[PeerId, str]:
        """Return why each member is gone, as seen from here; one that is here but too late waits before it returns."""
        clock, reasons = self._rules.clock, {}
        if not self._local.ready or after.parent != before.digest():
            return {}
        for peer in before.peers() - after.peers():
            member = before.member(peer)
            assert member is not None, "it was listed"
            last = max(self._presence.last_round(peer), member.since * clock.num_fragments)
            absent_seconds = max(clock.round_at(now) - last, 0) * clock.round_seconds
            if self._declarations.has_left(peer, member.incarnation):
                reasons[peer] = "left"
            elif not member.trains:
                reasons[peer] = "no longer needed"
            elif self._liveness.is_closed(member, now):
                reasons[peer] = "its link closed"
            else:
                reasons[peer] = f"in no entry for {absent_seconds:.0f} s"
                is_late = peer in self._liveness.alive(now) or peer == self._local.peer
                if is_late and not after.degraded:
                    listed_seconds = (after.cycle - member.since) * self._rules.cycle_seconds
                    self._declarations.returns.dropped(peer, member.incarnation, listed_seconds, now)
        return reasons

    def _forget_strangers(self, roster: Roster, now: float) -> None:
        """Drop what is kept about peers that are neither members nor present, so that nothing grows for ever."""
        members = roster.peers()
        self._liveness.forget_strangers(members, now)
        self._declarations.keep_only(members | self._liveness.views.keys() | {self._local.peer})
        self._presence.keep_only(members)


def _roster_sentence(before: Roster | None, after: Roster, reasons: Mapping[PeerId, str], me: PeerId) -> str:
    """Return a sentence on new and lost members of a roster; for the first roster seen, on all of them."""
    if before is None:
        changes = {"": _some([member.peer for member in after.members], {}, me)}
    else:
        changes = {
            "new: ": _some(sorted(after.peers() - before.peers()), {}, me),
            "gone: ": _some(sorted(before.peers() - after.peers()), reasons, me),
        }
    named = "; ".join(kind + names for kind, names in changes.items() if names)
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
