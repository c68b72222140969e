"""Who is here beyond the own row and column: reducers tell their column how their row is doing.

A heartbeat goes to the peers that are linked, about 2√N. A reducer puts those of its row into one report, a bit for
each member, and sends it down its column; so every reducer, and with it every lead, sees the whole swarm, at a cost
of √N small words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.entry import pack_included, places_in
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.member import MEMBER, Member
from p2p_diloco.protocol.overlay import column_mates
from p2p_diloco.protocol.roster import GOODBYE_LAYOUT, MOST_MEMBERS, Goodbye
from p2p_diloco.protocol.wire import DIGEST, U16, Layout, blob, many, record

MOST_COMING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """How one row is doing, as one of its reducers sees it.

    Attributes:
        roster: digest of the roster whose grid is meant.
        row: which row.
        present: bit i says that member i of the row is alive and ready.
        coming: listeners of the row that are ready, and members that have come again.
        goodbyes: of members of the row.
    """

    roster: Digest
    row: int
    present: bytes
    coming: tuple[Member, ...]
    goodbyes: tuple[Goodbye, ...]


ROW_REPORT_LAYOUT: Layout = (
    ("roster", DIGEST),
    ("row", U16),
    ("present", blob(MOST_MEMBERS // 8)),
    ("coming", many(MEMBER, MOST_COMING)),
    ("goodbyes", many(record(Goodbye, GOODBYE_LAYOUT), MOST_COMING)),
)


class Presence:
    """The reports of the other rows. A state machine without I/O.

    Args:
        me: this peer.
        keep_seconds: for how long a report is news.
    """

    def __init__(self, *, me: PeerId, keep_seconds: float) -> None:
        self._me = me
        self._keep_seconds = keep_seconds
        self._reports: dict[int, tuple[RowReport, float]] = {}

    def take(self, sender: PeerId, report: RowReport, grid: Grid, roster: Digest, now: float) -> bool:
        """Keep a report; False for one that its sender cannot give or of another roster than the one in force."""
        is_of_that_row = report.row < len(grid.rows) and grid.row_of.get(sender) == report.row
        if report.roster != roster or not is_of_that_row or sender not in column_mates(grid, self._me):
            return False
        self._reports[report.row] = (report, now)
        return True

    def sees_all(self, grid: Grid) -> bool:
        """Tell whether this peer is one to whom all rows report."""
        return len(grid.rows) > 1 and any(self._me in column for column in grid.columns)

    def everybody(
        self, here: Mapping[PeerId, Member], view: RowView, took_part: Mapping[PeerId, int], now: float
    ) -> dict[PeerId, Member]:
        """Return all who are alive and ready, as far as it is known here.

        A row whose reducer in our column is silent reports nothing. Its members are kept if they had a part in the
        last entries, or if there were none: no news is no evidence against anybody but that reducer.

        Args:
            here: whom this peer hears itself, itself included.
            took_part: round of the last entry for which each member was there.
        """
        present: dict[PeerId, Member] = {}
        lately = max(took_part.values(), default=-1) - view.num_fragments
        for row, peers in enumerate(view.grid.rows):
            report, at = self._reports.get(row, (None, 0.0))
            if row == view.row:
                continue
            if report is not None and report.roster == view.roster and now - at <= self._keep_seconds:
                places = (place for place in places_in(report.present) if place < len(peers))
                present.update((peers[place], view.members[peers[place]]) for place in places)
                present.update((m.peer, m) for m in report.coming if view.grid.row_for(m.peer) == row)
            else:
                silent = column_mates(view.grid, self._me) - here.keys()
                kept = (p for p in peers if p not in silent and took_part.get(p, -1) >= lately)
                present.update((peer, view.members[peer]) for peer in kept)
        return {**present, **here}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """The roster in force as one of its members sees it; `members` by peer, `row` the own one."""

    grid: Grid
    roster: Digest
    members: Mapping[PeerId, Member]
    row: int
    num_fragments: int


def make_report(view: RowView, here: Mapping[PeerId, Member], goodbyes: Sequence[Goodbye]) -> RowReport:
    """Return the report of the own row.

    Args:
        here: whom this peer knows to be alive and ready, itself included, at their incarnations.
        goodbyes: of members of the row.
    """
    peers = view.grid.rows[view.row]
    present = {place for place, peer in enumerate(peers) if here.get(peer) == view.members[peer]}
    coming = [
        member
        for peer, member in sorted(here.items())
        if view.grid.row_for(peer) == view.row and view.members.get(peer) != member
    ]
    return RowReport(
        roster=view.roster,
        row=view.row,
        present=pack_included(present, len(peers)),
        coming=tuple(coming[:MOST_COMING]),
        goodbyes=tuple(goodbyes[:MOST_COMING]),
    )
