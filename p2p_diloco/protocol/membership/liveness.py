"""Liveness: which peers are alive, by their heartbeats, whose clocks count here, and whether this peer is cut off."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership.declarations import MOST_KEPT, Declarations
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """The latest heartbeat of a peer, when it arrived, and the start of the time in which the peer was never silent."""

    heartbeat: Heartbeat
    at: float
    since: float


class Liveness:
    """The heartbeats that arrived at this peer. A state machine without I/O.

    Args:
        linked: peers to which messages can be sent now; shared with the engine, which updates it.
    """

    def __init__(self, local: LocalState, declarations: Declarations, linked: Collection[PeerId]) -> None:
        self._local = local
        self._declarations = declarations
        self._linked = linked
        self._rules = local.rules
        self._book = local.book
        self._verify = local.verify
        self.views: dict[PeerId, PeerView] = {}
        self._ticked_at, self._awake_since = -math.inf, math.inf
        self._lonely_since: float | None = None
        self._has_reported_lonely = False

    # -- time

    def tick(self, now: float) -> bool:
        """Note that this peer is awake; return whether it was just started, or has slept until now."""
        has_slept = now - self._ticked_at > self._rules.silence_seconds
        if has_slept:
            self._awake_since = now
        self._ticked_at = now
        return has_slept

    def set_back(self, now: float) -> None:
        """Remove all times that are in the future, because the clock was far ahead."""
        self._ticked_at = self._awake_since = now
        self.views = {
            peer: replace(view, at=min(view.at, now), since=min(view.since, now)) for peer, view in self.views.items()
        }

    # -- heartbeats

    def take(self, heartbeat: Heartbeat, now: float) -> bool:
        """Receive a heartbeat; return False if it is ignored, such as one that is old or not signed by its peer."""
        peer, known = heartbeat.peer, self.views.get(heartbeat.peer)
        if known is None and len(self.views) >= MOST_KEPT and not self._book.lists(peer):
            return False
        if known is not None and self._is_older(heartbeat, known, now):
            return False
        if heartbeat.run != self._rules.run or not self._verify(peer, heartbeat.statement(), heartbeat.signature):
            return False
        since = known.since if known is not None and now - known.at <= self._rules.silence_seconds else now
        self.views[peer] = PeerView(heartbeat=heartbeat, at=now, since=since)
        return True

    def _is_older(self, heartbeat: Heartbeat, known: PeerView, now: float) -> bool:
        """Return whether a heartbeat is older than the last one that its peer sent.

        Incarnations that start on a new disk are numbered by the clock. If the clock was far ahead once, the next such
        incarnation has a smaller number. Its heartbeats count once the greater one is silent, unless the roster still
        lists another incarnation: that one cannot return and must be dropped, so the peer stays silent until then.
        """
        last, roster = known.heartbeat, self._book.in_force
        if heartbeat.incarnation < last.incarnation and now - known.at > self._rules.silence_seconds:
            member = roster.member(heartbeat.peer) if roster is not None else None
            return member is not None and member.incarnation != heartbeat.incarnation
        return (heartbeat.incarnation, heartbeat.sequence) <= (last.incarnation, last.sequence)

    def alive(self, now: float) -> dict[PeerId, Heartbeat]:
        """Return the latest heartbeats of peers that are not silent and have not declared that they leave."""
        earliest, has_left = now - self._rules.silence_seconds, self._declarations.has_left
        return {
            peer: view.heartbeat
            for peer, view in self.views.items()
            if view.at >= earliest and not has_left(peer, view.heartbeat.incarnation)
        }

    def forget_strangers(self, members: Collection[PeerId], now: float) -> None:
        """Drop the heartbeats of peers that are neither members nor present, so that nothing grows for ever."""
        long_ago = now - 4 * self._rules.silence_seconds
        self.views = {peer: view for peer, view in self.views.items() if peer in members or view.at > long_ago}

    # -- members that have gone

    def was_linked_since(self, peer: PeerId, since: float) -> bool:
        """Return whether a peer has a link to this one and was never silent since then."""
        return peer in self._linked and self.views[peer].since <= since

    def is_closed(self, member: Member, now: float) -> bool:
        """Return whether the link to a member was closed and has stayed so, as after a kill."""
        long_ago, view = now - self._rules.closed_seconds, self.views.get(member.peer)
        has_gone = view is not None and view.at < long_ago and member.peer not in self._linked
        return has_gone and self._awake_since <= long_ago and self._should_arrive(member)

    def is_silent(self, member: Member, now: float) -> bool:
        """Return whether a member whose heartbeats should arrive here has sent none for long."""
        long_ago = now - self._rules.absence_rounds * self._rules.clock.round_seconds
        view = self.views.get(member.peer)
        is_silent = view is None or view.at < long_ago
        return is_silent and self._awake_since <= long_ago and self._should_arrive(member)

    def _should_arrive(self, member: Member) -> bool:
        """Return whether heartbeats of a member should arrive here."""
        grid = self._book.grid()
        is_near = grid is not None and (len(grid.rows) == 1 or member.peer in grid.neighbours(self._local.peer))
        return is_near and (self._local.conditions.can_be_dialled or member.reduces)

    # -- members that this peer can have a link to

    def _others(self) -> frozenset[PeerId]:
        """Return the other members that this peer can have a link to."""
        roster, me, is_open = self._book.in_force, self._local.peer, self._local.conditions.can_be_dialled
        members = roster.members if roster is not None else ()
        return frozenset(m.peer for m in members if m.peer != me and (is_open or m.reduces))

    # -- clocks

    def clocks(self, now: float) -> frozenset[PeerId]:
        """Return the peers whose clocks count here: the other members that this peer can have a link to.

        For a joiner, only those with live heartbeats count. Voters alone are not enough: a run begins with one, and a
        peer that slept or was restarted needs others to ask. If this peer cannot be sure of a link to any member, those
        with live heartbeats count, as in one home, if with this peer they are more than half of all members: a single
        one may lie. Otherwise the founder's clock counts, because peers that cannot reach each other need a common one.
        """
        roster, me, others = self._book.in_force, self._local.peer, self._others()
        if roster is None:
            return others
        alive = self.alive(now).keys()
        here = roster.peers() & (alive | {me})
        if not others and 2 * len(here) > len(roster.members):
            others = here - {me}
        if not others and me != self._book.founder:
            return frozenset((self._book.founder,))
        return others if self._book.lists(me) else (others & alive or others)

    def depends_on_hub(self, clocks: frozenset[PeerId]) -> bool:
        """Return whether the only clock that counts is of a peer with links to members that this one cannot link to."""
        roster, me = self._book.in_force, self._local.peer
        if roster is None or len(clocks) != 1 or len(roster.peers() | clocks) <= 2 or me == self._book.founder:
            return False
        hubs = {self._book.founder, *(member.peer for member in roster.members if member.reduces)}
        return me not in hubs and clocks <= hubs

    # -- splits

    def report_split(self, now: float) -> list[Action]:
        """Report once when this peer is cut off from most of the electorate, and once when that is over.

        The lack of a majority counts only after `silence_seconds`: at the start no heartbeats have arrived yet.
        """
        me, voters = self._local.peer, self._voters_near()
        num_alive = len(voters & {me, *self.alive(now)})
        is_member = self._book.lists(me)
        if not is_member or 2 * num_alive > len(voters):
            had_reported, self._has_reported_lonely, self._lonely_since = self._has_reported_lonely, False, None
            text = f"in contact with {num_alive} of {len(voters)} voters again"
            return [Report(topic="split", text=text)] if had_reported and is_member else []
        if self._lonely_since is None:
            self._lonely_since = now
        if self._has_reported_lonely or now - self._lonely_since < self._rules.silence_seconds:
            return []
        self._has_reported_lonely = True
        text = (
            f"in contact with {num_alive} of {len(voters)} voters; entries need more than half of them; training "
            "continues meanwhile"
        )
        return [Report(topic="split", text=text)]

    def _voters_near(self) -> frozenset[PeerId]:
        """Return the voters that this peer should have heartbeats of, where possible; in a grid, its row and column."""
        roster, grid, me = self._book.in_force, self._book.grid(), self._local.peer
        if roster is None or grid is None:
            return frozenset()
        if len(grid.rows) == 1 or me not in grid.row_of:
            others = self._others()
            return (others & roster.voters or others) | ({me} & roster.voters)
        return grid.neighbours(me) | {me}
