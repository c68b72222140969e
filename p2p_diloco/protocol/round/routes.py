"""Chooses the links of this peer, and the ways of rosters and entries in a grid.

In a run of one row everybody talks with everybody and nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, KeepRoster, Send
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.proposal import REFRESH_CYCLES
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.grid import Grid, column_mates, fold_roster, grid_order, row_mates
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import Roster

DIALLED_AHEAD_CYCLES = 2
FEW_LINKS = 2
"""With fewer links than these a peer needs one to anybody: those that it should have lead nowhere."""


class Routes:
    """One peer's place in the grid in force. A state machine without I/O.

    Args:
        linked: peers to which messages can be sent now; shared with the engine, which keeps it.
    """

    def __init__(self, *, rules: RunRules, membership: Membership, linked: Collection[PeerId]) -> None:
        self._rules = rules
        self._membership = membership
        self._me = membership.me.peer
        self._linked = linked

    def wanted_links(self, round_index: int | None, announced: Collection[PeerId] = ()) -> frozenset[PeerId] | None:
        """Return whom this peer needs a link to, for the rounds of now and the grid that comes next; None: to all.

        A peer without a place in a grid, and without a row that waits for it, may link with any; so may a stuck one.
        Two branches that both have grids would never meet, were links kept with members only: each row meets its share
        of all strangers.

        Args:
            announced: peers of the run that are said to be there, members or not.
        """
        book = self._membership.book
        grid, roster = book.grid(), book.in_force
        if grid is None or roster is None or len(grid.rows) == 1 or self._is_stuck():
            return None
        grids = [grid]
        governing = book.governing(round_index) if round_index is not None else None
        if governing is not None:
            grids.append(governing[1])
        cycle = self._rules.clock.cycle(round_index) if round_index is not None else roster.cycle
        drawing = (cycle + DIALLED_AHEAD_CYCLES) // REFRESH_CYCLES
        if drawing > roster.cycle // REFRESH_CYCLES:  # dialled ahead: a new grid costs connections
            drawn = replace(roster, members=grid_order(roster.members, roster.run, drawing))
            grids.append(fold_roster(drawn, self._rules.group_size))
        row = grid.row_of.get(self._me)  # who is no member leaves it to those who are
        strangers = (peer for peer in announced if peer not in grid.row_of and grid.row_for(peer) == row)
        wanted = frozenset(strangers).union(*(each.neighbours(self._me) for each in grids))
        return (wanted | self._to_vote_with(roster)) - {self._me}

    def _to_vote_with(self, roster: Roster) -> frozenset[PeerId]:
        """Return whom this peer needs a link to for ballots: voters to leaders, and leaders to voters."""
        may_lead = roster.leaders | {self._membership.book.founder}
        voters = roster.voters if self._me in may_lead else frozenset()
        return voters | may_lead if self._me in roster.voters else voters

    def is_cut_off(self) -> bool:
        """Return whether the links that this peer should have are of no use: too few, or no roster is certified."""
        return len(self._linked) < FEW_LINKS or self._is_stuck()

    def _is_stuck(self) -> bool:
        """Return whether no roster comes about for long.

        When most of a roster has died, its living members may have no link to each other, and none may be on the way
        from one to the other.
        """
        void_cycles = self._membership.void_cycles
        return void_cycles > 0 and 2 * void_cycles >= self._rules.stalled_cycles

    def hand_on_rosters(
        self, grid: Grid | None, sender: PeerId, actions: Collection[Action], now: float, deadline: float
    ) -> list[Action]:
        """Pass rosters that came down the column on to the own row and to listeners.

        Args:
            grid: in force before they came.
            actions: what came of them; those that were new here are passed on.
        """
        learnt = tuple(action.certified for action in actions if isinstance(action, KeepRoster))
        if not learnt or grid is None or len(grid.rows) == 1 or sender not in column_mates(grid, self._me):
            return []
        listeners = {peer for peer in self._membership.alive(now) if peer not in grid.row_of}
        reply = RosterReply(rosters=learnt)
        to = sorted(row_mates(grid, self._me) | listeners)
        return [Send(to=peer, message=reply, deadline=deadline) for peer in to]

    def hand_down(self, entry: Entry, now: float) -> list[Action]:
        """Pass an entry on: its owner to the reducers of the other rows, every reducer to its row and its listeners.

        Ready listeners too: they are on the next roster, and would begin it a cycle behind.
        """
        _, grid = self._membership.book.folded(entry.roster, entry.round)
        clock = self._rules.clock
        if entry.round != clock.round_at(now) or self._me not in grid.column(entry.span):
            return []
        alive = self._membership.alive(now).items()
        ready = {peer for peer, beat in alive if beat.ready and peer not in grid.row_of}
        row = grid.row_for(self._me)
        to = set(grid.rows[row]) | {peer for peer in ready if grid.row_for(peer) == row}
        if grid.owner(entry.span) == self._me:
            to.update(grid.column(entry.span))
        deadline = clock.begin(entry.round + 1)
        return [Send(to=peer, message=entry, deadline=deadline) for peer in sorted(to - {self._me})]
