"""Reports when a peer is cut off from most of the electorate, and when that is over."""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.rules import RunRules


class SplitWatch:
    """Watches for a split and reports it, and nothing else. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self._rules = rules
        self._membership = membership
        self._lonely_since: float | None = None
        self._has_reported_lonely = False

    def tick(self, now: float) -> list[Action]:
        """Report each change once.

        The lack of a majority counts only after `silence_seconds`: at the start no heartbeats have arrived yet.
        """
        me, voters, roster = self._membership.me.peer, self._near(), self._membership.book.in_force
        num_heard = len(voters & {me, *self._membership.alive(now)})
        is_member = roster is not None and roster.member(me) is not None
        if not is_member or 2 * num_heard > len(voters):
            has_said, self._has_reported_lonely, self._lonely_since = self._has_reported_lonely, False, None
            text = f"in contact with {num_heard} of {len(voters)} voters again"
            return [Report(topic="split", text=text)] if has_said and is_member else []
        if self._lonely_since is None:
            self._lonely_since = now
        if self._has_reported_lonely or now - self._lonely_since < self._rules.silence_seconds:
            return []
        self._has_reported_lonely = True
        text = (
            f"in contact with {num_heard} of {len(voters)} voters; entries need more than half of them; training "
            "continues meanwhile"
        )
        return [Report(topic="split", text=text)]

    def _near(self) -> frozenset[PeerId]:
        """Return the voters that this peer should have heartbeats of, where possible; in a grid, its row and column."""
        roster, grid = self._membership.book.in_force, self._membership.book.grid()
        if roster is None or grid is None:
            return frozenset()
        me = self._membership.me.peer
        if len(grid.rows) == 1 or me not in grid.row_of:
            return self._membership.audible_voters() | ({me} & roster.voters)
        return grid.neighbours(me) | {me}
