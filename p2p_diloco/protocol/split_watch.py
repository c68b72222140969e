"""Says it in words when a peer is cut off from most of its roster, meets another branch, and when that is over."""

from __future__ import annotations

from p2p_diloco.ids import ZERO_DIGEST, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.rules import RunRules


class SplitWatch:
    """What one peer has noticed and said. A state machine without I/O; decides nothing."""

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self._rules = rules
        self._membership = membership
        self._lonely_since: float | None = None
        self._has_said_lonely = False
        self._strangers: frozenset[PeerId] = frozenset()

    def tick(self, now: float) -> list[Action]:
        """Say once what has changed."""
        return [*self._look_for_members(now), *self._look_for_strangers(now)]

    def _look_for_members(self, now: float) -> list[Action]:
        """Hearing no majority must last as long as a silence before it counts: at a start nobody has been heard yet."""
        me, members = self._membership.me.peer, self._near()
        num_heard = len(members & {me, *self._membership.alive(now)})
        if me not in members or 2 * num_heard > len(members):
            has_said, self._has_said_lonely, self._lonely_since = self._has_said_lonely, False, None
            text = f"hears {num_heard} of {len(members)} members again"
            return [Report(topic="split", text=text)] if has_said and me in members else []
        if self._lonely_since is None:
            self._lonely_since = now
        if self._has_said_lonely or now - self._lonely_since < self._rules.silence_seconds:
            return []
        self._has_said_lonely = True
        text = (
            f"hears {num_heard} of {len(members)} members; no entry comes about without more than half of them, and "
            "training goes on meanwhile"
        )
        return [Report(topic="split", text=text)]

    def _near(self) -> frozenset[PeerId]:
        """Return the members that this peer should hear: all, in a grid those that it is linked with."""
        roster, grid = self._membership.book.in_force, self._membership.book.grid()
        if roster is None or grid is None:
            return frozenset()
        me = self._membership.me.peer
        if len(grid.rows) == 1 or me not in grid.row_of:
            return roster.peers()
        return grid.neighbours(me) | {me}

    def _look_for_strangers(self, now: float) -> list[Action]:
        """A roster that is junior to ours and not on our chain, all of which is known here, is of another branch."""
        book, mine = self._membership.book, self._membership.book.in_force
        if mine is None:
            return []
        before, self._strangers = (
            self._strangers,
            frozenset(
                peer
                for peer, beat in self._membership.alive(now).items()
                if beat.roster != ZERO_DIGEST
                and beat.roster not in book
                and (beat.included_total, beat.roster_k) < (mine.included_total, mine.k)
            ),
        )
        if before or not self._strangers:
            return []
        names = ", ".join(map(short_peer_id, sorted(self._strangers)))
        text = f"met {names} on another branch of rosters; ours, of epoch {mine.epoch}, wins: they adopt our state"
        return [Report(topic="split", text=text)]
