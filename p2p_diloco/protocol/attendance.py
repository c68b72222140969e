"""Who is here: heartbeats and good-byes as this peer hears them, and what reducers say of their rows.

What follows from it, the next roster, is the business of `membership.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.heartbeat import Heartbeat
from p2p_diloco.protocol.member import FULL_SHARE, Member
from p2p_diloco.protocol.overlay import column_mates
from p2p_diloco.protocol.presence import Presence, RowReport, RowView, make_report
from p2p_diloco.protocol.roster import Goodbye, Verify
from p2p_diloco.protocol.roster_book import RosterBook
from p2p_diloco.protocol.rules import RunRules

MOST_HEARD = 4096
"""Members of the roster in force aside: strangers must keep none of them out."""
MOST_GOODBYES = 4
"""Of one peer: the incarnation that a roster lists and the one that is heard matter, older ones do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Self:
    """This peer, as the rules see it; `sign` is its key, `can_be_dialled` what is known of that at its start."""

    peer: PeerId
    incarnation: int
    can_be_dialled: bool
    trains: bool
    sign: Callable[[bytes], bytes]

    def member(self, share: int = FULL_SHARE) -> Member:
        """Return this incarnation as it would stand on a roster."""
        return _member(self.peer, self.incarnation, self.can_be_dialled, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The latest heartbeat of a peer, when it came, and since when the peer has been heard without a silence."""

    heartbeat: Heartbeat
    at: float
    since: float


def _member(peer: PeerId, incarnation: int, can_be_dialled: bool, share: int) -> Member:
    """Return a member; who cannot be dialled averages nothing, and is listed with a full share."""
    share = max(share, 1) if can_be_dialled else FULL_SHARE
    return Member(peer=peer, incarnation=incarnation, can_be_dialled=can_be_dialled, share=share)


class Attendance:
    """One peer's view of who is here. A state machine without I/O.

    `took_part` holds the round of the last entry for which each member was there; it is kept by the engine. `share` is
    what this peer's line carries of averaging, `can_be_dialled` whether others have proved it reachable; they are kept
    by the shell.
    """

    def __init__(self, *, me: Self, rules: RunRules, book: RosterBook, verify: Verify) -> None:
        self.me = me
        self.rules = rules
        self.book = book
        self.heard: dict[PeerId, Heard] = {}
        self.took_part: dict[PeerId, int] = {}
        self.share = FULL_SHARE
        self.can_be_dialled = me.can_be_dialled
        self._latest_part = -1
        self.ready = False
        self.leaving = False
        self._goodbyes: dict[tuple[PeerId, int], Goodbye] = {}
        self._verify = verify
        self._presence = Presence(me=me.peer, keep_seconds=rules.silence_seconds)

    def hear(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take a heartbeat; False for one that is old or not signed by its peer."""
        known = self.heard.get(heartbeat.peer)
        if known is None and len(self.heard) >= MOST_HEARD and not self._is_listed(heartbeat.peer):
            return False
        age = (heartbeat.incarnation, heartbeat.sequence)
        if known is not None and age <= (known.heartbeat.incarnation, known.heartbeat.sequence):
            return False
        if heartbeat.run != self.rules.run or not self._verify(
            heartbeat.peer, heartbeat.statement(), heartbeat.signature
        ):
            return False
        since = known.since if known is not None and now - known.at <= self.rules.silence_seconds else now
        self.heard[heartbeat.peer] = Heard(heartbeat=heartbeat, at=now, since=since)
        return True

    def note_part(self, peers: frozenset[PeerId], round_index: int) -> None:
        """Note who was there for an entry of a round."""
        if round_index >= self._latest_part:
            self._latest_part = round_index
            self.took_part.update(dict.fromkeys(peers, round_index))
        else:
            before = {peer: max(round_index, self.took_part.get(peer, -1)) for peer in peers}
            self.took_part.update(before)

    def alive(self, now: float) -> dict[PeerId, Heartbeat]:
        """Return the latest heartbeats of peers that are not silent and have not said good-bye; without this peer."""
        earliest = now - self.rules.silence_seconds
        return {
            peer: heard.heartbeat
            for peer, heard in self.heard.items()
            if heard.at >= earliest and (peer, heard.heartbeat.incarnation) not in self._goodbyes
        }

    def num_ready(self, now: float) -> int:
        """Return how many peers that train are alive and ready, this one included.

        In a grid of several rows only reducers know; others take it that the members are. Two members that can only
        dial out never hear each other: of these the entries tell who is there.
        """
        grid, roster = self.book.grid(), self.book.in_force
        if grid is not None and roster is not None and len(grid.rows) > 1 and not self._presence.sees_all(grid):
            return len(roster.members)
        return len(self.present(now).keys() | self._unheard_in_entries(now))

    def _unheard_in_entries(self, now: float) -> frozenset[PeerId]:
        """Return the members never heard here that were there for an entry of the last cycle."""
        members = self.book.in_force.peers() if self.book.in_force is not None else frozenset()
        clock = self.rules.clock
        since = clock.round_at(now) - clock.num_fragments
        unheard = members - self.heard.keys() - {self.me.peer}
        return frozenset(peer for peer in unheard if self.took_part.get(peer, -1) >= max(since, 0))

    def has_left(self, member: Member) -> bool:
        """Tell whether that incarnation has said good-bye."""
        return self.has_said_goodbye(member.peer, member.incarnation)

    def has_said_goodbye(self, peer: PeerId, incarnation: int) -> bool:
        """Tell whether that incarnation of a peer has said good-bye."""
        return (peer, incarnation) in self._goodbyes

    def take_goodbye(self, word: Goodbye) -> bool:
        """Note a good-bye; False when it is not signed by its peer or known already."""
        key = (word.peer, word.incarnation)
        is_member = word.peer == self.me.peer or self._is_listed(word.peer)
        if key in self._goodbyes or word.run != self.rules.run or not (is_member or word.peer in self.heard):
            return False
        if not self._verify(word.peer, word.statement(), word.signature):
            return False
        said = sorted(old for old in self._goodbyes if old[0] == word.peer)
        if len(said) >= MOST_GOODBYES:
            if key < said[0]:
                return False
            del self._goodbyes[said[0]]
        self._goodbyes[key] = word
        return True

    def _is_listed(self, peer: PeerId) -> bool:
        roster = self.book.in_force
        return roster is not None and roster.member(peer) is not None

    # -- rows

    def _here(self, now: float) -> dict[PeerId, Member]:
        """Return whom this peer knows itself to be alive and ready, itself included."""
        here = {
            peer: _member(peer, beat.incarnation, beat.can_be_dialled, beat.share)
            for peer, beat in self.alive(now).items()
            if beat.ready and beat.trains and self.rules.may_be_member(peer)
        }
        if self.ready and self.me.trains and not self.leaving and self.rules.may_be_member(self.me.peer):
            here[self.me.peer] = _member(self.me.peer, self.me.incarnation, self.can_be_dialled, self.share)
        return here

    def _row_view(self) -> RowView | None:
        """Return the grid in force if this peer is one to whom all rows of it report."""
        roster, grid, digest = self.book.in_force, self.book.grid(), self.book.in_force_digest
        if roster is None or grid is None or digest is None or not self._presence.sees_all(grid):
            return None
        return RowView(
            grid=grid,
            roster=digest,
            members={member.peer: member for member in roster.members},
            row=grid.row_for(self.me.peer),
            num_fragments=self.rules.clock.num_fragments,
        )

    def present(self, now: float) -> dict[PeerId, Member]:
        """Return all who are alive and ready, as far as it is known here."""
        here, view = self._here(now), self._row_view()
        if view is None:
            return here
        everybody = self._presence.everybody(here, view, self.took_part, now)
        return {
            peer: member
            for peer, member in everybody.items()
            if (peer, member.incarnation) not in self._goodbyes and self.rules.may_be_member(peer)
        }

    def row_reports(self, now: float) -> list[Action]:
        """Tell the own column how the own row is doing."""
        view = self._row_view()
        if view is None:
            return []
        words = [word for word in self._goodbyes.values() if view.grid.row_of.get(word.peer) == view.row]
        report = make_report(view, self._here(now), words)
        deadline = now + self.rules.silence_seconds
        mates = sorted(column_mates(view.grid, self.me.peer))
        return [Send(to=peer, message=report, deadline=deadline) for peer in mates]

    def take_report(self, sender: PeerId, report: RowReport, now: float) -> None:
        """Take what a reducer of our column says of its row."""
        view = self._row_view()
        if view is not None and self._presence.take(sender, report, view.grid, view.roster, now):
            for word in report.goodbyes:
                self.take_goodbye(word)
