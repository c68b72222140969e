"""Rosters: which certified roster this peer takes, and what changes once it is in force."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepActivity, KeepRoster, Report
from p2p_diloco.protocol.membership.declarations import Declarations
from p2p_diloco.protocol.membership.histories import LineHistory, is_left_behind, is_left_by_all
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.membership.presence import Presence
from p2p_diloco.protocol.membership.stall import PATIENT_STALLS, Stall
from p2p_diloco.protocol.membership.votes import Votes
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, check_certificate, is_majority
from p2p_diloco.rate import counted

MOST_REFUSED = 16
"""Number of refused rosters to remember, so that each is reported once."""
MOST_SIGNERS_SHOWN = 4
MOST_NAMED = 16
"""Maximum number of members that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Parts that hold what this peer has observed of the members, and what it has promised and voted for."""

    local: LocalState
    declarations: Declarations
    liveness: Liveness
    presence: Presence
    stall: Stall
    votes: Votes


class Rosters:
    """Takes certified rosters into the book, and begins anew under each that comes into force."""

    def __init__(self, seen: Observations) -> None:
        self._seen = seen
        self._rules = seen.local.rules
        self._book = seen.local.book
        self.history = LineHistory(self._book)
        self._refused: list[Digest] = []
        self._has_reported_forgotten = False
        self._doubts_since: float | None = None
        self._signed_rosters: Mapping[PeerId, tuple[Digest, float]] = {}

    def entry_absorbed(self, round_index: int) -> None:
        """Note that the line in force is alive: it got an entry."""
        self.end_doubt()
        self.history.entry_absorbed(self._rules.clock.cycle(round_index))

    def keep_activity(self) -> list[Action]:
        """Return the action that stores the activity of the line in force; none if it has not changed."""
        news = self.history.news()
        return [KeepActivity(activity=news)] if news is not None else []

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
        member = mine.member(self._seen.local.peer) if mine is not None else None
        if ahead > 1 and member is not None and member.incarnation == self._seen.local.me.incarnation:
            raise PeerError(f"roster {roster.k} was voted for {ahead} rounds from now; at most one is allowed")
        is_child = roster.parent == self._book.in_force_digest
        if mine is not None and roster.degraded and is_child and roster.digest() not in self._book:
            self._check_degraded(certified, mine, now)
        return self.history.is_better(certified, clock.cycle_at(now))

    def _report_forgotten(self, certified: CertifiedRoster) -> list[Action]:
        """Report, once, that a child of the roster in force has a vote of this peer that is not on its disk."""
        if self._has_reported_forgotten or not self._seen.votes.has_forgotten(certified):
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

    # -- degraded rosters, certified with fewer votes than a majority

    # One member's vote can be enough for such a roster. A stalled peer follows it at once if its signers may have acted
    # in good faith. A peer that returns to a swarm that continued without it checks twice, because the first message
    # may come from a liar.

    @property
    def doubts(self) -> bool:
        """Return whether others follow a degraded roster that this peer has not adopted."""
        return self._doubts_since is not None

    def end_doubt(self) -> None:
        """Begin anew: the roster in force has changed or got an entry, or this peer has slept."""
        self._doubts_since = None

    def note_signed_rosters(self, signed: Mapping[PeerId, tuple[Digest, float]]) -> None:
        """Take, per voter without a link, the roster that it signed as the one in force, and when."""
        self._signed_rosters = signed

    def _check_degraded(self, certified: CertifiedRoster, mine: Roster, now: float) -> None:
        """Raise PeerError for a degraded child of ours, unless this peer is stalled too or most others have moved on.

        Most others are more than half of the members with live heartbeats, or of the electorate. That much of the
        electorate could have certified an ordinary child, and it keeps members that all wait from holding each other
        back for ever.
        """
        check_certificate(certified, mine, self._seen.local.verify, self._rules)
        roster, signers = certified.roster, [peer for peer, _ in certified.votes]
        has_quorum = self._seen.stall.quorum(mine, degraded=True)(signers)
        if self._seen.stall.confirms(mine) and has_quorum and self._may_be_honest(roster, mine, signers, now):
            return
        clock = self._rules.clock
        is_idle = self._seen.presence.latest_round() < clock.round_at(now) - 2 * clock.num_fragments
        since = self._doubts_since
        self._doubts_since = (now if since is None else since) if is_idle else None
        if since is not None and is_idle and self._have_moved_on(mine, since, now):
            return
        names = ", ".join(map(short_peer_id, sorted(signers)[:MOST_SIGNERS_SHOWN]))
        raise PeerError(
            f"roster {roster.k}, signed by {names}, has no majority of roster {roster.k - 1}; only stalled peers take "
            f"it, after {self._rules.stalled_cycles} cycles without entries, or after "
            f"{PATIENT_STALLS * self._rules.stalled_cycles} while voters that have not signed it are here; this peer "
            f"had {self._seen.stall.cycles_without_entries}"
        )

    def _have_moved_on(self, mine: Roster, since: float, now: float) -> bool:
        """Return whether most others have followed another roster since this peer began to doubt.

        If a member follows a roster that is known here, its entries, or those that it names, get time to arrive.
        """
        beats = list(self._seen.liveness.alive(now).values())
        named = self._rosters_named(beats, now)
        is_alive = is_majority(mine, [peer for peer, known in named if known in self._book])
        have_voters_gone = is_majority(mine, [peer for peer, unknown in named if unknown not in self._book])
        if is_alive or not (have_voters_gone or is_left_behind(mine, beats, self._book)):
            return False
        seconds = self._rules.silence_seconds
        if not is_left_by_all(mine, beats, self._book):
            seconds = max(seconds, self._rules.stalled_cycles * self._rules.cycle_seconds)
        return now - since >= seconds

    def _rosters_named(self, beats: Sequence[Heartbeat], now: float) -> list[tuple[PeerId, Digest]]:
        """Return the rosters that others follow, by their heartbeats and recently signed statements."""
        since = now - 2 * self._rules.cycle_seconds - self._rules.silence_seconds
        signed = [(peer, roster) for peer, (roster, at) in self._signed_rosters.items() if at >= since]
        by_heartbeat = [(beat.peer, beat.roster) for beat in beats]
        return [(peer, roster) for peer, roster in (*signed, *by_heartbeat) if roster != ZERO_DIGEST]

    def _may_be_honest(self, roster: Roster, mine: Roster, signers: Collection[PeerId], now: float) -> bool:
        """Return whether those who signed a degraded child of ours may have done so in good faith.

        Members that do not vote continue alone only if nobody who can vote is there. Of voters that were started anew
        nobody knows whether they remember their votes, so they hold back the others only until the stall is long. A
        child that omits this peer is in doubt while another voter waits here too, or if who signed it was linked to
        this peer in the whole stall and so knows that it is there; who slept, or was cut off, may have missed it. Peers
        that have lost the state hold back nobody: they could do so for ever.
        """
        local = self._seen.local
        beats = {peer: beat for peer, beat in self._seen.liveness.alive(now).items() if beat.ready}
        if not local.ready:
            return True
        able = {
            member.peer
            for peer, beat in beats.items()
            if (member := mine.member(peer)) is not None and member.incarnation == beat.incarnation
        }
        if self._seen.votes.knows_its_own(mine):
            able.add(local.peer)
        able &= mine.voters
        here = mine.voters & {local.peer, *beats}
        if (able or (here and not self._seen.stall.is_long())) and not mine.voters.intersection(signers):
            return False
        if local.leaving or mine.member(local.peer) is None or roster.member(local.peer) is not None:
            return True
        waiting = {peer for peer, beat in beats.items() if beat.roster == self._book.in_force_digest}
        since = now - self._rules.stalled_cycles * self._rules.cycle_seconds
        knew = any(peer in beats and self._seen.liveness.was_linked_since(peer, since) for peer in signers)
        return not knew and not able & waiting - set(signers)

    # -- entering

    def _enter(self, before: Roster | None, after: Roster, now: float) -> list[Action]:
        """Begin anew under the roster that is now in force."""
        self._seen.stall.roster_entered(after, now)
        self.end_doubt()
        actions = self._seen.local.renumber(after)
        if before is None or after.degraded or before.peers() != after.peers():
            reasons = self._note_dropped(before, after, now) if before is not None else {}
            text = _roster_sentence(before, after, reasons, self._seen.local.peer)
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
        if not self._seen.local.ready or after.parent != before.digest():
            return {}
        for peer in before.peers() - after.peers():
            member = before.member(peer)
            assert member is not None, "it was listed"
            last = max(self._seen.presence.last_round(peer), member.since * clock.num_fragments)
            absent_seconds = max(clock.round_at(now) - last, 0) * clock.round_seconds
            if self._seen.declarations.has_left(peer, member.incarnation):
                reasons[peer] = "left"
            elif not member.trains:
                reasons[peer] = "no longer needed"
            elif self._seen.liveness.is_closed(member, now):
                reasons[peer] = "its link closed"
            else:
                reasons[peer] = f"in no entry for {absent_seconds:.0f} s"
                is_late = peer in self._seen.liveness.alive(now) or peer == self._seen.local.peer
                if is_late and not after.degraded:
                    listed_seconds = (after.cycle - member.since) * self._rules.cycle_seconds
                    self._seen.declarations.returns.dropped(peer, member.incarnation, listed_seconds, now)
        return reasons

    def _forget_strangers(self, roster: Roster, now: float) -> None:
        """Drop what is kept about peers that are neither members nor present, so that nothing grows for ever."""
        members = roster.peers()
        self._seen.liveness.forget_strangers(members, now)
        self._seen.declarations.keep_only(members | self._seen.liveness.views.keys() | {self._seen.local.peer})
        self._seen.presence.keep_only(members)


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
