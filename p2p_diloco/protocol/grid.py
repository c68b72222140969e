"""Who averages with whom and who owns which span: a pure function of the roster.

The roster's order is the grid. This page folds one row, up to `group_size` members; rows and columns come with the
same two functions, so callers ask for owners and never for the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.roster import Member, Roster, reducers


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The folded roster: rows of members in grid order, and for each fragment the owner of each span."""

    rows: tuple[tuple[PeerId, ...], ...]
    reducers: tuple[PeerId, ...]
    rotation: int

    def owner(self, span: SpanId) -> PeerId | None:
        """Return who finishes `span` for everybody; None while nobody can be reached."""
        if not self.reducers:
            return None
        return self.reducers[(span.index + span.fragment + self.rotation) % len(self.reducers)]

    def owned(self, peer: PeerId, fragment: int, num_spans: int) -> tuple[SpanId, ...]:
        """Return the spans of `fragment` that `peer` owns, in order."""
        spans = (SpanId(fragment, index) for index in range(num_spans))
        return tuple(span for span in spans if self.owner(span) == peer)


def fold_roster(roster: Roster) -> Grid:
    """Fold a roster into its grid. Owners rotate with each roster, shares are equal to within one span."""
    return Grid(rows=(tuple(m.peer for m in roster.members),), reducers=reducers(roster), rotation=roster.k)


def grid_order(members: Sequence[Member], run: Digest, regrid: int) -> tuple[Member, ...]:
    """Return members in grid order: those that can be dialled dealt first, each part drawn by hash."""
    seed = run + regrid.to_bytes(4, "little")
    return tuple(sorted(members, key=lambda m: (not m.can_be_dialled, sha256(seed, m.peer))))
