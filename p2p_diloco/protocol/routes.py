"""Whom this peer is linked with, and the ways of its words in a grid: to a lead, to a row, to everybody.

In a run of one row everybody talks with everybody and nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, KeepRoster, Report, Send
from p2p_diloco.protocol.ballot import Promise, Vote
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.grid import REGRID_ROSTERS, Grid, fold_roster, grid_order
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.messages import RosterReply, decode_message, encode_message
from p2p_diloco.protocol.overlay import MOST_HOPS, Relay, hands_on_to, next_hop
from p2p_diloco.protocol.rules import RunRules

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

        Who has no place in a grid yet, and no row that waits for it, may talk with anybody, and so may who is stuck.
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
        if (roster.k + 2) // REGRID_ROSTERS > roster.regrid:  # dialled ahead: a new grid costs connections
            regrid = roster.regrid + 1
            drawn = replace(roster, regrid=regrid, members=grid_order(roster.members, roster.run, regrid))
            grids.append(fold_roster(drawn, self._rules.group_size))
        row = grid.row_of.get(self._me)  # who is no member leaves it to those who are
        strangers = (peer for peer in announced if peer not in grid.row_of and grid.row_for(peer) == row)
        return frozenset(strangers).union(*(each.neighbours(self._me) for each in grids)) - {self._me}

    def is_cut_off(self) -> bool:
        """Tell whether the links that this peer should have lead nowhere: too few of them, or no roster comes about."""
        return len(self._linked) < FEW_LINKS or self._is_stuck()

    def _is_stuck(self) -> bool:
        """Tell whether no roster comes about for long.

        When most of a roster has died, its living members may have no link to each other, and none may be on the way
        from one to the other.
        """
        void_cycles = self._membership.void_cycles
        return void_cycles > 0 and 2 * void_cycles >= self._rules.void_cycles

    # -- to one

    def routed(self, actions: list[Action]) -> list[Action]:
        """Send words to a lead that is not linked by way of the grid."""
        grid = self._membership.book.grid()
        if grid is None or len(grid.rows) == 1:
            return actions
        return [self._relayed(action, grid) if isinstance(action, Send) else action for action in actions]

    def _relayed(self, send: Send, grid: Grid) -> Send:
        if not isinstance(send.message, Promise | Vote) or send.to in self._linked:
            return send
        hop = next_hop(grid, self._me, send.to, self._linked)
        if hop is None:
            return send
        relay = Relay(to=send.to, source=self._me, hops=1, frame=encode_message(send.message))
        return Send(to=hop, message=relay, deadline=send.deadline)

    def arrived(self, relay: Relay) -> Promise | Vote | Report:
        """Return the word of a relay that is for this peer; a report when it is none that is relayed."""
        try:
            word = decode_message(relay.frame)
        except PeerError as error:
            return Report(topic="frame-refused", text=f"{short_peer_id(relay.source)} had relayed: {error}")
        if isinstance(word, Promise | Vote):
            return word
        return Report(topic="frame-refused", text=f"{short_peer_id(relay.source)} had something relayed that is not")

    def pass_on(self, relay: Relay, deadline: float) -> list[Action]:
        """Send a relay on its way."""
        grid = self._membership.book.grid()
        hop = next_hop(grid, self._me, relay.to, self._linked) if grid is not None else None
        if hop is None or relay.hops >= MOST_HOPS:
            return []
        return [Send(to=hop, message=replace(relay, hops=relay.hops + 1), deadline=deadline)]

    # -- to all

    def hand_on_rosters(
        self, grid: Grid | None, sender: PeerId, actions: Collection[Action], now: float, deadline: float
    ) -> list[Action]:
        """Pass rosters that came down the column on to the own row and to listeners.

        Args:
            grid: in force before they came.
            actions: what came of them; those that were new here are passed on.
        """
        learnt = tuple(action.certified for action in actions if isinstance(action, KeepRoster))
        row = hands_on_to(grid, sender, self._me) if grid is not None else frozenset()
        if not learnt or not row or grid is None:
            return []
        listeners = {peer for peer in self._membership.alive(now) if peer not in grid.row_of}
        if len(learnt) == 1:
            return self._membership.spread(learnt[0], row | listeners, deadline)
        # Several are what one asked for that was behind; its row may be too, and would ask for each of them.
        reply = RosterReply(rosters=learnt)
        return [Send(to=peer, message=reply, deadline=deadline) for peer in sorted(row | listeners)]

    def hand_down(self, entry: Entry, now: float) -> list[Action]:
        """Pass an entry on: its owner to the reducers of the other rows, every reducer to its row and its listeners.

        Ready listeners too: they are on the next roster, and would begin it a cycle behind.
        """
        roster, grid = self._membership.book.folded[entry.roster]
        clock = self._rules.clock
        # A lone member at home reduces by itself, and the hub is all that it sees: listeners are the hub's to serve.
        if entry.round != clock.round_at(now) or self._me not in {*grid.column(entry.span), roster.hub()}:
            return []
        alive = self._membership.alive(now).items()
        ready = {peer for peer, beat in alive if beat.ready and beat.trains and peer not in grid.row_of}
        row = grid.row_for(self._me)
        to = set(grid.rows[row]) | {peer for peer in ready if grid.row_for(peer) == row}
        if grid.owner(entry.span) == self._me:
            to.update(grid.column(entry.span))
        hub = roster.hub()
        if hub is not None:
            to.add(hub)
        deadline = clock.begin(entry.round + 1)
        return [Send(to=peer, message=entry, deadline=deadline) for peer in sorted(to - {self._me})]
