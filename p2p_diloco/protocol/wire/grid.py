"""The grid: which members average together and which own a span; a pure function of the roster.

The roster's order is the grid. Up to `group_size` members are one row: its reducers finish what they reduce. More
members fold into rows of about √N. Each row is an averaging group whose reducers hold one column each; the owner of a
span is one of its column and averages the rows' means for everybody. So a peer talks with its row and its column,
about 2√N others, however large the swarm is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import Roster, reducers


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The folded roster.

    Attributes:
        rows: members of each row in grid order, those that reduce first; rows differ by at most one member.
        columns: for each column its reducer in each row; at least one, for a roster has members.
        turns: columns in the order in which spans are dealt to them, each as often as it has shares.
        rotation: spans move on by one turn and one row with each cycle, so that shares are kept over time.
        row_of: the row of each member.
    """

    rows: tuple[tuple[PeerId, ...], ...]
    columns: tuple[tuple[PeerId, ...], ...]
    turns: tuple[int, ...]
    rotation: int
    row_of: Mapping[PeerId, int]

    def turned(self, cycle: int) -> Grid:
        """Return the grid with the owners of a cycle."""
        return replace(self, rotation=cycle)

    def column_index(self, span: SpanId) -> int:
        """Return the column that reduces `span`."""
        return self.turns[(span.index + span.fragment + self.rotation) % len(self.turns)]

    def column(self, span: SpanId) -> tuple[PeerId, ...]:
        """Return the reducers of `span`, one per row."""
        return self.columns[self.column_index(span)]

    def owner(self, span: SpanId) -> PeerId:
        """Return who finishes `span` for everybody."""
        column = self.column(span)
        return column[(span.index // len(self.columns) + self.rotation) % len(column)]

    def reducer(self, span: SpanId, row: int) -> PeerId:
        """Return who averages `span` for the members of `row`."""
        return self.column(span)[row]

    def row_for(self, peer: PeerId) -> int:
        """Return the row of a member; a listener is dealt to one, whose reducers hand it the entries."""
        row = self.row_of.get(peer)
        return row if row is not None else int.from_bytes(peer[:4], "little") % len(self.rows)

    def owned(self, peer: PeerId, fragment: int, num_spans: int) -> tuple[SpanId, ...]:
        """Return the spans of `fragment` that `peer` finishes, in order."""
        spans = (SpanId(fragment, index) for index in range(num_spans))
        return tuple(span for span in spans if self.owner(span) == peer)

    def reduced(self, peer: PeerId, fragment: int, num_spans: int) -> tuple[SpanId, ...]:
        """Return the spans of `fragment` that `peer` averages for its row, in order."""
        spans = (SpanId(fragment, index) for index in range(num_spans))
        return tuple(span for span in spans if peer in self.column(span))

    def share_of(self, peer: PeerId) -> float:
        """Return how much `peer` averages, over the mean of those who do; 0 for who does not."""
        mine = sum(peer in self.columns[index] for index in self.turns)
        return mine * len(self.columns) / len(self.turns) if mine else 0.0

    def reducers(self) -> frozenset[PeerId]:
        """Return all who reduce, in any row."""
        return frozenset(peer for column in self.columns for peer in column)

    def neighbours(self, peer: PeerId) -> frozenset[PeerId]:
        """Return with whom `peer` shares a row or a column, as a member or as a listener: whom it needs a link to."""
        row = self.row_for(peer)
        near = set(self.rows[row]).union(column[row] for column in self.columns)
        for column in self.columns:
            if peer in column:
                near.update(column)
        return frozenset(near - {peer})


def num_rows(members: int, reachable: int, group_size: int) -> int:
    """Return R = max(1, min(⌈N/g⌉, reachable/2)), for rows of width g = max(`group_size`, ⌈√N⌉).

    So each row has two reducers at least.
    """
    width = max(group_size, math.isqrt(members - 1) + 1)
    return max(1, min(-(-members // width), reachable // 2))


def fold_roster(roster: Roster, group_size: int) -> Grid:
    """Fold a roster into its grid, with the owners of cycle 0. Members are dealt in order, one to each row in turn."""
    peers = tuple(member.peer for member in roster.members)
    reachable = reducers(roster)
    height = num_rows(len(peers), len(reachable), group_size)
    rows = tuple(peers[row::height] for row in range(height))
    num_columns = len(reachable) // height
    dealt = [reachable[row::height] for row in range(height)]
    columns = tuple(tuple(dealt[row][index] for row in range(height)) for index in range(num_columns))
    return Grid(
        rows=rows,
        columns=columns,
        turns=deal_turns([_share(roster, column) for column in columns]),
        rotation=0,
        row_of={peer: row for row, members in enumerate(rows) for peer in members},
    )


def deal_turns(shares: Sequence[int]) -> tuple[int, ...]:
    """Return places in turn, each as often as its shares without their common divisor, spread evenly.

    Places with equal shares come one after the other.

    Args:
        shares: of each place, at least 1.
    """
    divisor = math.gcd(*shares)
    weights = [share // divisor for share in shares]
    if len(weights) == sum(weights):
        return tuple(range(len(weights)))
    # A place with w turns has one in each w-th of the whole, the later in it the later the place: equal shares take
    # turns one after the other, and those of small ones do not come together.
    whole, number = math.lcm(*weights), len(weights)
    turns = [
        ((2 * number * k + 2 * place + 1) * (whole // w), place) for place, w in enumerate(weights) for k in range(w)
    ]
    return tuple(place for _, place in sorted(turns))


def _share(roster: Roster, column: Sequence[PeerId]) -> int:
    """Return the shares of a column's reducers, one at least for each."""
    return sum(max(member.share, 1) for member in roster.members if member.peer in column)


def grid_order(members: Collection[Member], run: Digest, drawing: int) -> tuple[Member, ...]:
    """Return members in the order of a newly drawn grid: those that reduce first, each part drawn by hash."""
    seed = run + drawing.to_bytes(8, "little")
    return tuple(sorted(members, key=lambda m: (not m.reduces, sha256(seed, m.peer))))


def keep_places(before: Sequence[Member], members: Collection[Member], run: Digest, drawing: int) -> tuple[Member, ...]:
    """Return members in the order of the grid before: who stays keeps its place, so that few links change.

    Gaps are filled with newcomers, then with the last of their part; who is left over comes at the end of its part.
    """
    now = {member.peer: member for member in members}
    order: list[Member] = []
    for reduces in (True, False):
        places = [now.get(m.peer) for m in before if m.reduces == reduces]
        kept = [m if m is not None and m.reduces == reduces else None for m in places]
        stayed = {m.peer for m in kept if m is not None}
        here = [m for m in grid_order(members, run, drawing) if m.reduces == reduces]
        order += _fill_gaps(kept, [m for m in here if m.peer not in stayed])
    return tuple(order)


def _fill_gaps(kept: list[Member | None], fillers: list[Member]) -> list[Member]:
    """Fill gaps from the front: with newcomers, then with whoever stands last."""
    whole, waiting = list(kept), list(reversed(fillers))
    for place, member in enumerate(whole):
        if member is None and waiting:
            whole[place] = waiting.pop()
    whole += reversed(waiting)
    place = 0
    while place < len(whole):
        if whole[place] is not None:
            place += 1
        elif (last := whole.pop()) is not None:
            whole[place] = last
    return [member for member in whole if member is not None]


def column_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the reducers that hold the same column in other rows; none for who reduces nothing."""
    mates = {peer for column in grid.columns if me in column for peer in column}
    return frozenset(mates - {me})


def row_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the other members of the row of `me`."""
    return frozenset(grid.rows[grid.row_for(me)]) - {me}
