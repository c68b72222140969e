"""Choose the links of a peer, and the paths of rosters and entries in a grid.

In a run of one row, all peers are linked with each other and nothing here has any effect.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, KeepRoster, Send
from p2p_diloco.protocol.grid import Grid, column_mates, fold_roster, row_mates
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.proposal import REFRESH_CYCLES
from p2p_diloco.protocol.membership.roster_book import first_that_fit
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import Roster, grid_order

DIALLED_AHEAD_CYCLES = 2


class Paths:
    """One peer's place in the grid in force. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self._rules = rules
        self._membership = membership
        self._me = membership.local.peer

    def wanted_links(self, round_index: int | None, announced: Collection[PeerId] = ()) -> frozenset[PeerId] | None:
        """Return the peers that this peer needs links to, for current rounds and the next grid; None: all peers.

        A stuck peer, or one in a run without a grid, may link with any peer. Each row links to its share of the peers
        that are not members: with links to members only, two branches that both have grids would never meet.

        Args:
            announced: peers of the run that have been announced, members or not.
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
        if drawing > roster.cycle // REFRESH_CYCLES:  # dial early: a new grid needs new connections
            drawn = replace(roster, members=grid_order(roster.members, roster.run, drawing))
            grids.append(fold_roster(drawn, self._rules.group_size))
        row = grid.row_of.get(self._me)  # None for a peer that is not a member: members make these links
        strangers = (peer for peer in announced if peer not in grid.row_of and grid.row_for(peer) == row)
        wanted = frozenset(strangers).union(*(each.neighbours(self._me) for each in grids))
        return (wanted | self._to_vote_with(roster)) - {self._me}

    def _to_vote_with(self, roster: Roster) -> frozenset[PeerId]:
        """Return the peers that this peer needs links to for ballots: voters to leaders, and leaders to voters."""
        may_lead = roster.leaders | {self._membership.book.founder}
        voters = roster.voters if self._me in may_lead else frozenset()
        return voters | may_lead if self._me in roster.voters else voters

    def _is_stuck(self) -> bool:
        """Return whether the run has been without entries for half as long as a stall takes.

        If most members of a roster are gone, the remaining ones may have no links to each other, and no other member
        that connects them.
        """
        cycles_without_entries = self._membership.stall.cycles_without_entries
        return cycles_without_entries > 0 and 2 * cycles_without_entries >= self._rules.stalled_cycles

    def hand_on_rosters(
        self, grid: Grid | None, sender: PeerId, actions: Collection[Action], now: float, deadline: float
    ) -> list[Action]:
        """Forward rosters that arrived along the column to this peer's row and to listeners.

        Args:
            grid: the grid in force before they arrived.
            actions: actions that they caused; rosters that were new here are forwarded.
        """
        learnt = [action.certified for action in actions if isinstance(action, KeepRoster)]
        if not learnt or grid is None or len(grid.rows) == 1 or sender not in column_mates(grid, self._me):
            return []
        listeners = {peer for peer in self._membership.liveness.alive(now) if peer not in grid.row_of}
        reply = RosterReply(rosters=first_that_fit([(certified, certified.num_bytes()) for certified in learnt]))
        to = sorted(row_mates(grid, self._me) | listeners)
        return [Send(to=peer, message=reply, deadline=deadline) for peer in to]

    def hand_down(self, entry: Entry, now: float) -> list[Action]:
        """Forward an entry. The owner sends it to the reducers of all rows, and each reducer to its row.

        Reducers also send it to the listeners of their row that are ready, or nearly level: those are on the next
        roster, and would otherwise begin it a cycle late.
        """
        _, grid = self._membership.book.folded(entry.roster, entry.round)
        clock = self._rules.clock
        if entry.round != clock.round_at(now) or self._me not in grid.column(entry.span):
            return []
        alive = self._membership.liveness.alive(now).items()
        listeners = {peer for peer, beat in alive if beat.takes_entries and peer not in grid.row_of}
        row = grid.row_for(self._me)
        to = set(grid.rows[row]) | {peer for peer in listeners if grid.row_for(peer) == row}
        if grid.owner(entry.span) == self._me:
            to.update(grid.column(entry.span))
        deadline = clock.begin(entry.round + 1)
        return [Send(to=peer, message=entry, deadline=deadline) for peer in sorted(to - {self._me})]
