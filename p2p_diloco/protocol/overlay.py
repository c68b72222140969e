"""Ways through the grid: how a word reaches a peer that is not linked, and how it reaches everybody.

A peer is linked with its row and its column only. From anywhere to anywhere it is one step along a row and one down a
column; to everybody it goes from a reducer to its row and its column, and from each of the column to its row. Words
that travel so are signed by whom they come from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.wire import PEER, U8, Layout, blob

MOST_HOPS = 4
MOST_RELAYED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A word on its way to a peer that its sender is not linked with.

    Attributes:
        to, source: the two ends; the word's own signature proves the source.
        hops: links that it has passed.
        frame: the word, encoded.
    """

    to: PeerId
    source: PeerId
    hops: int
    frame: bytes


RELAY_LAYOUT: Layout = (("to", PEER), ("source", PEER), ("hops", U8), ("frame", blob(MOST_RELAYED_BYTES)))


def column_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the reducers that hold the same column in other rows; none for who reduces nothing."""
    mates = {peer for column in grid.columns if me in column for peer in column}
    return frozenset(mates - {me})


def row_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the other members of the row of `me`."""
    return frozenset(grid.rows[grid.row_for(me)]) - {me}


def hands_on_to(grid: Grid, sender: PeerId, me: PeerId) -> frozenset[PeerId]:
    """Return to whom `me` passes on a word for everybody that came from `sender`: down the column, then along rows."""
    if len(grid.rows) == 1 or sender not in column_mates(grid, me):
        return frozenset()
    return row_mates(grid, me)


def next_hop(grid: Grid, me: PeerId, to: PeerId, linked: Collection[PeerId]) -> PeerId | None:
    """Return the next peer on the way to `to`, or None when no way is known.

    The column of `to` is tried first: from there it is one more step for all who send to it.
    """
    if to in linked:
        return to
    here, there = grid.row_for(me), grid.row_for(to)
    for column in sorted(grid.columns, key=lambda column: to not in column):
        if column[here] == me and column[there] in linked and here != there:
            return column[there]
        if column[here] != me and column[here] in linked:
            return column[here]
    return None
