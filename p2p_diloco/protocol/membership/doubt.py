"""Doubt: when to follow a degraded roster that others certified with fewer votes than a majority."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, short_peer_id
from p2p_diloco.protocol.membership.histories import is_left_behind, is_left_by_all
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.membership.presence import Presence
from p2p_diloco.protocol.membership.stall import Stall
from p2p_diloco.protocol.membership.votes import Votes
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, check_certificate, is_majority

MOST_SIGNERS_SHOWN = 4


class Doubt:
    """Checks degraded children of the roster in force. A state machine without I/O.

    One member's vote can be enough for such a roster. A stalled peer follows it at once if its signers may have acted
    in good faith. A peer that returns to a swarm that continued without it checks twice, because the first message may
    come from a liar.
    """

    def __init__(self, local: LocalState, liveness: Liveness, presence: Presence, stall: Stall, votes: Votes) -> None:
        self._local = local
        self._liveness = liveness
        self._presence = presence
        self._stall = stall
        self._votes = votes
        self._rules = local.rules
        self._book = local.book
        self._verify = local.verify
        self._since: float | None = None
        self._signed_rosters: Mapping[PeerId, tuple[Digest, float]] = {}

    @property
    def is_open(self) -> bool:
        """Return whether others follow a degraded roster that this peer has not adopted."""
        return self._since is not None

    def end(self) -> None:
        """Begin anew: the roster in force has changed or got an entry, or this peer has slept."""
        self._since = None

    def note_signed_rosters(self, signed: Mapping[PeerId, tuple[Digest, float]]) -> None:
        """Take, per voter without a link, the roster that it signed as the one in force, and when."""
        self._signed_rosters = signed

    def check(self, certified: CertifiedRoster, mine: Roster, now: float) -> None:
        """Raise PeerError for a degraded child of ours, unless this peer is stalled too or most others have moved on.

        Most others are more than half of the members with live heartbeats, or of the electorate. That much of the
        electorate could have certified an ordinary child, and it keeps members that all wait from holding each other
        back for ever.
        """
        check_certificate(certified, mine, self._verify, self._rules)
        roster, signers = certified.roster, [peer for peer, _ in certified.votes]
        has_quorum = self._stall.quorum(mine, degraded=True)(signers)
        if self._stall.has_seen(mine) and has_quorum and self._may_be_honest(roster, mine, signers, now):
            return
        clock = self._rules.clock
        is_idle = self._presence.latest_round() < clock.round_at(now) - 2 * clock.num_fragments
        since = self._since
        self._since = (now if since is None else since) if is_idle else None
        if since is not None and is_idle and self._have_moved_on(mine, since, now):
            return
        names = ", ".join(map(short_peer_id, sorted(signers)[:MOST_SIGNERS_SHOWN]))
        raise PeerError(
            f"roster {roster.k}, signed by {names}, has no majority of roster {roster.k - 1}; only stalled peers take "
            f"it, after {self._rules.stalled_cycles} cycles without entries; this peer had "
            f"{self._stall.cycles_without_entries}"
        )

    def _have_moved_on(self, mine: Roster, since: float, now: float) -> bool:
        """Return whether most others have followed another roster since this peer began to doubt.

        If a member follows a roster that is known here, its entries, or those that it names, get time to arrive.
        """
        beats = list(self._liveness.alive(now).values())
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
        local = self._local
        beats = {peer: beat for peer, beat in self._liveness.alive(now).items() if beat.ready}
        if not local.ready:
            return True
        able = {
            member.peer
            for peer, beat in beats.items()
            if (member := mine.member(peer)) is not None and member.incarnation == beat.incarnation
        }
        if self._votes.knows_its_own(mine):
            able.add(local.peer)
        able &= mine.voters
        here = mine.voters & {local.peer, *beats}
        if (able or (here and not self._stall.is_long())) and not mine.voters.intersection(signers):
            return False
        if local.leaving or mine.member(local.peer) is None or roster.member(local.peer) is not None:
            return True
        waiting = {peer for peer, beat in beats.items() if beat.roster == self._book.in_force_digest}
        since = now - self._rules.stalled_cycles * self._rules.cycle_seconds
        knew = any(peer in beats and self._liveness.was_linked_since(peer, since) for peer in signers)
        return not knew and not able & waiting - set(signers)
