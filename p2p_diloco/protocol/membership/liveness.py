"""Liveness: which peers are alive, by their heartbeats, and which members have fallen silent or lost their link."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
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
