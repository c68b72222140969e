"""Contact: the members that this peer can have links to, whose clocks count here, and whether it is cut off."""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState


class Contact:
    """Watch over the members in contact with this peer. It reports a split, and decides nothing."""

    def __init__(self, local: LocalState, liveness: Liveness) -> None:
        self._local = local
        self._liveness = liveness
        self._rules = local.rules
        self._book = local.book
        self._lonely_since: float | None = None
        self._has_reported_lonely = False

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
        alive = self._liveness.alive(now).keys()
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
        num_alive = len(voters & {me, *self._liveness.alive(now)})
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
