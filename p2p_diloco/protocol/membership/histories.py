"""Which of two lines of rosters to follow, after a swarm was split or stalled.

The comparison uses only what both sides hold: the certified rosters since the one at which the lines part. So both
sides prefer the same line, and cannot swap lines. See docs/decisions/agreement.md.

A line is *sound* if a majority certified all of it, it made entries, and it had no long gap until now. No other line
from the same parting can be sound too, unless a leader lies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from p2p_diloco.ids import ZERO_DIGEST, Digest
from p2p_diloco.protocol.membership.proposal import REFRESH_CYCLES
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.wire.frames import U64
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster

LONGEST_GAP_CYCLES = REFRESH_CYCLES + 8
"""Maximum number of cycles between two rosters of a swarm that is alive."""

LIVELY_CYCLES = 8
"""Maximum number of cycles between two entries of a line that is alive."""

Strength = tuple[bool, bool, int, int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A peer's record of activity on its own line of rosters. It is kept on disk and never sent to other peers.

    Attributes:
        roster: the roster in force when the last entry was absorbed.
        first, last: cycles of the first and the last entry since the line's last longer gap.
    """

    roster: Digest
    first: Annotated[int, U64]
    last: Annotated[int, U64]

    def goes_on(self, cycle: int) -> bool:
        """Return whether the last entry is recent enough for the line to be alive in `cycle`."""
        return self.last >= cycle - LIVELY_CYCLES


def is_sound(parting: Roster, line: Sequence[CertifiedRoster], cycle: int) -> bool:
    """Return whether a line kept a majority since the parting, made entries, and had no long gap until now.

    Two of three members that meet in the morning have a majority, and a gap of one night. Their line is not worth more
    than that of the third, which continued alone all night. Nor is the line of a bootstrap peer that was cut off from
    all trainers.
    """
    if not line or any(certified.roster.degraded for certified in line) or line[-1].roster.height <= parting.height:
        return False
    cycles = [parting.cycle, *(certified.roster.cycle for certified in line), cycle]
    return all(late - early <= LONGEST_GAP_CYCLES for early, late in pairwise(cycles))


def strength(parting: Roster, line: Sequence[CertifiedRoster], cycle: int) -> Strength:
    """Return the key by which two lines from one parting are compared; the greater one is better.

    A sound line wins. Next comes one that made entries and has a vote of the electorate of the parting roster: any
    member can sign a line alone, and claim all entries that are possible. Next comes the work: the number of entries
    that the line absorbed since the parting, according to its last roster, times the number of members of the parting
    roster that signed it. Then more signers win, and then the smaller digest.
    """
    if not line:
        return (False, False, 0, 0, b"")
    signers = {peer for certified in line for peer, _ in certified.votes} & parting.peers()
    grown = line[-1].roster.height - parting.height
    complement = bytes(255 - byte for byte in line[0].roster.digest())
    is_voted = grown > 0 and not signers.isdisjoint(parting.voters)
    return (is_sound(parting, line, cycle), is_voted, grown * len(signers), len(signers), complement)


class LineHistory:
    """Observations of the line of rosters in force: whether it gets entries, and for how long."""

    def __init__(self, book: RosterBook) -> None:
        self._book = book
        self._observed: Activity | None = None
        self._kept: Activity | None = None

    def entry_absorbed(self, cycle: int) -> None:
        """Note that the line in force is alive: it got an entry."""
        before = self._observed if self._observed is not None and self._observed.goes_on(cycle) else None
        first, last = (before.first, max(cycle, before.last)) if before is not None else (cycle, cycle)
        assert self._book.in_force_digest is not None, "entries follow rosters"
        self._observed = Activity(roster=self._book.in_force_digest, first=first, last=last)

    def branch_adopted(self) -> None:
        """Forget what was observed: another line is in force now."""
        self._observed = None

    def recall(self, activity: Activity) -> None:
        """Restore what this peer had observed of its line before a restart, if that line is in force."""
        if self._book.is_on_chain(activity.roster):
            self._observed = self._kept = activity

    def news(self) -> Activity | None:
        """Return what to write to disk; None if nothing has changed since the last call."""
        if self._observed is None or self._observed == self._kept:
            return None
        self._kept = self._observed
        return self._observed

    def is_better(self, certified: CertifiedRoster, cycle: int) -> bool | None:
        """Return whether a roster ends a better line than the one in force; None if the lines do not part."""
        roster = certified.roster
        parting = self._book.parting(roster.parent)
        if parting is None or roster.digest() in self._book or roster.parent == self._book.in_force_digest:
            return None
        begin, ours, theirs = parting
        line = [*theirs, certified]
        if self._is_lively(ours, line, cycle):
            return False
        return strength(begin, line, cycle) > strength(begin, ours, cycle)

    def _is_lively(self, ours: Sequence[CertifiedRoster], theirs: Sequence[CertifiedRoster], cycle: int) -> bool:
        """Return whether our line has kept a majority since before the other one began, as observed here.

        If a majority certified the other line too, it comes from former voters or a lying leader; a lie shows at once.
        A line that ends with a roster of a later cycle does not go on: who certified it had a clock that was ahead.
        """
        observed = self._observed
        if observed is None or not observed.goes_on(cycle) or any(each.roster.degraded for each in ours):
            return False
        if ours[-1].roster.cycle > cycle + LIVELY_CYCLES:
            return False
        first, begun = observed.first, ours[0].roster.cycle
        if any(each.roster.degraded for each in theirs):
            return first <= theirs[0].roster.cycle
        return begun <= cycle - LIVELY_CYCLES and first <= begun + LIVELY_CYCLES


def is_left_behind(roster: Roster, heartbeats: Collection[Heartbeat], book: RosterBook) -> bool:
    """Return whether most members of `roster` among the senders follow rosters unknown here, or none is among them."""
    named = _named(roster, heartbeats)
    return not named or 2 * sum(digest not in book for digest in named) > len(named)


def is_left_by_all(roster: Roster, heartbeats: Collection[Heartbeat], book: RosterBook) -> bool:
    """Return whether no member of `roster` among the senders follows a roster that is known here."""
    return not any(digest in book for digest in _named(roster, heartbeats))


def _named(roster: Roster, heartbeats: Collection[Heartbeat]) -> list[Digest]:
    return [beat.roster for beat in heartbeats if roster.member(beat.peer) is not None and beat.roster != ZERO_DIGEST]
