"""The grid of a round: who averages together, who reduces and who owns each span, as a function of the roster.

The order of the roster is the order of the grid. Up to `group_size` members are one row, whose reducers finish what
they reduce. More members fold into rows of about √N. Each row is an averaging group, and each of its reducers holds one
column. The owner of a span is one of the members of the column of the span, and averages the means of the rows for all
peers. So a peer talks to its row and its column, about 2√N others, however large the swarm is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.wire.roster import Roster, reducers


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The folded roster.

    Attributes:
        rows: members of each row in grid order, reducers first; rows differ by at most one member.
        columns: for each column, its reducer in each row; at least one column, because a roster has members.
        turns: columns in the order in which spans are dealt to them, each in proportion to its shares.
        rotation: cycle by which spans are shifted: one turn and one row per cycle, so that shares hold over time.
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
        """Return the peer that finishes `span` for all peers."""
        column = self.column(span)
        return column[(span.index // len(self.columns) + self.rotation) % len(column)]

    def reducer(self, span: SpanId, row: int) -> PeerId:
        """Return the peer that averages `span` for the members of `row`."""
        return self.column(span)[row]

    def row_for(self, peer: PeerId) -> int:
        """Return the row of a peer; a listener is assigned to a row too, whose reducers send it the entries."""
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
        """Return how much `peer` averages, relative to the mean of all columns; 0 if it does not reduce."""
        mine = sum(peer in self.columns[index] for index in self.turns)
        return mine * len(self.columns) / len(self.turns) if mine else 0.0

    def reducers(self) -> frozenset[PeerId]:
        """Return the reducers of all rows."""
        return frozenset(peer for column in self.columns for peer in column)

    def neighbours(self, peer: PeerId) -> frozenset[PeerId]:
        """Return the peers in the row or column of `peer`, a member or a listener: those that it needs a link to."""
        row = self.row_for(peer)
        near = set(self.rows[row]).union(column[row] for column in self.columns)
        for column in self.columns:
            if peer in column:
                near.update(column)
        return frozenset(near - {peer})


def num_rows(members: int, reachable: int, group_size: int) -> int:
    """Return R = max(1, min(⌈N/g⌉, reachable/2)), for rows of width g = max(`group_size`, ⌈√N⌉).

    So each row has at least two reducers, or there is only one row.
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
    """Return a sequence of places, each as often as its share divided by the common divisor, spread evenly.

    Places with equal shares alternate.

    Args:
        shares: the share of each place, at least 1.
    """
    divisor = math.gcd(*shares)
    weights = [share // divisor for share in shares]
    if len(weights) == sum(weights):
        return tuple(range(len(weights)))
    # A place with w turns has one in each w-th part of the sequence; later places come later within the part. So places
    # with equal shares alternate, and the turns of places with small shares do not cluster.
    whole, number = math.lcm(*weights), len(weights)
    turns = [
        ((2 * number * k + 2 * place + 1) * (whole // w), place) for place, w in enumerate(weights) for k in range(w)
    ]
    return tuple(place for _, place in sorted(turns))


def _share(roster: Roster, column: Sequence[PeerId]) -> int:
    """Return the sum of the shares of a column's reducers, each counted as at least 1."""
    return sum(max(member.share, 1) for member in roster.members if member.peer in column)


def column_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the reducers that hold the same column in other rows; none for a peer that does not reduce."""
    mates = {peer for column in grid.columns if me in column for peer in column}
    return frozenset(mates - {me})


def row_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the other members of the row of `me`."""
    return frozenset(grid.rows[grid.row_for(me)]) - {me}
