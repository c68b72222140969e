"""Ways through the grid: how a certified roster reaches everybody.

It goes from who certified it to its row and its column, and from each of the column to its row.
"""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.grid import Grid


def column_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the reducers that hold the same column in other rows; none for who reduces nothing."""
    mates = {peer for column in grid.columns if me in column for peer in column}
    return frozenset(mates - {me})


def row_mates(grid: Grid, me: PeerId) -> frozenset[PeerId]:
    """Return the other members of the row of `me`."""
    return frozenset(grid.rows[grid.row_for(me)]) - {me}
