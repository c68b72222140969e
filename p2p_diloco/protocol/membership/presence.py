"""Presence: what the entries show about each member, and the view of all members that a voter reports from it.

An owner whose spans get no entries while those of others do cannot do its part: the log is the evidence. The cause does
not matter: the owner is unreachable, its line is thin, or it withholds entries. It loses *reduces* for a while. So a
wrong claim of being reachable costs the spans that it owns a few cycles and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.membership.declarations import Declarations
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.rules import ABSENT_CYCLES
from p2p_diloco.protocol.wire.ballot import View
from p2p_diloco.protocol.wire.entry import pack_included
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import Roster

IDLE_CYCLES = 2
"""Number of cycles without an entry in any of its spans, while another owner's got some, after which an owner loses
*reduces*."""
FEWEST_MISSED = 2
"""Minimum number of missed rounds for that: in a large run, one such round may be all that it owned in many cycles."""
LOST_CYCLES = 16


@dataclass(slots=True)
class _Owner:
    """One incarnation that owns spans: its latest round with an entry, and its rounds without one since then."""

    last_entry: int = -1
    idle_since: int = 0
    num_missed: int = 0

    def made_entry(self, round_index: int) -> None:
        self.last_entry = max(self.last_entry, round_index)

    def round_over(self, round_index: int) -> None:
        if self.last_entry >= round_index:
            self.num_missed = 0
            return
        if self.num_missed == 0 or self.last_entry >= self.idle_since:
            self.idle_since, self.num_missed = round_index, 0
        self.num_missed += 1


class OwnerLog:
    """Counts, from this peer's logs, the entries that each owner made or missed. A state machine without I/O.

    A restarted owner counts as a new one: its fault may have been fixed.
    """

    def __init__(self, *, clock: RoundClock) -> None:
        self._clock = clock
        self._owners: dict[tuple[PeerId, int], _Owner] = {}
        self._lost: dict[tuple[PeerId, int], range] = {}
        """Members that have lost *reduces*, each with the rounds in which its spans got no entries."""

    def entry_absorbed(self, round_index: int, span: SpanId, roster: Roster, grid: Grid) -> None:
        """Note that a span got an entry in a round, however late the entry arrived.

        A peer that slept or was cut off saw no entries and considered their owner idle. One entry of those rounds shows
        that it was wrong.
        """
        name = _incarnation(roster, grid.owner(span))
        self._owners.setdefault(name, _Owner()).made_entry(round_index)
        if round_index in self._lost.get(name, ()):
            del self._lost[name]

    def round_over(self, round_index: int, num_spans: int, roster: Roster, grid: Grid) -> tuple[PeerId, ...]:
        """Note the owners of a round that is over; return those that lose *reduces* because of it.

        Args:
            num_spans: number of spans of the fragment of that round.
            roster, grid: those that governed the round.
        """
        fragment = self._clock.fragment(round_index)
        owned = {_incarnation(roster, grid.owner(SpanId(fragment, index))) for index in range(num_spans)}
        for name in owned:
            self._owners.setdefault(name, _Owner()).round_over(round_index)
        members = {(member.peer, member.incarnation) for member in roster.members}
        self._owners = {name: owner for name, owner in self._owners.items() if name in members}
        long_ago = round_index - LOST_CYCLES * self._clock.num_fragments
        self._lost = {n: idle for n, idle in self._lost.items() if idle[-1] > long_ago and n in members}
        losers = tuple(sorted(name for name, owner in self._owners.items() if self._loses(name, owner, round_index)))
        for name in losers:
            self._lost[name] = range(self._owners.pop(name).idle_since, round_index + 1)
        return tuple(peer for peer, _ in losers)

    def forget(self) -> None:
        """Start over: this peer does not follow the logs, and without the entries all owners seem idle."""
        self._owners.clear()

    def lost(self) -> frozenset[tuple[PeerId, int]]:
        """Return the members that have lost *reduces* at present, with their incarnations."""
        return frozenset(self._lost)

    def _loses(self, name: tuple[PeerId, int], owner: _Owner, round_index: int) -> bool:
        window = IDLE_CYCLES * self._clock.num_fragments
        is_idle = owner.num_missed >= FEWEST_MISSED and owner.last_entry < owner.idle_since
        if not is_idle or round_index + 1 - owner.idle_since < window:
            return False
        since = round_index + 1 - window
        return any(other.last_entry >= since for key, other in self._owners.items() if key != name)


def _incarnation(roster: Roster, peer: PeerId) -> tuple[PeerId, int]:
    member = roster.member(peer)
    assert member is not None, "owners are members"
    return (member.peer, member.incarnation)


CYCLES_SEEN = 8
COUNTS_AFTER_CYCLES = 4
"""A member counts when entries of this many of the last eight cycles since its listing include its contributions."""


class Presence:
    """Record of how often entries name each member. A state machine without I/O."""

    def __init__(self, local: LocalState, declarations: Declarations, liveness: Liveness) -> None:
        self._local = local
        self._declarations = declarations
        self._liveness = liveness
        self._rules = local.rules
        self._book = local.book
        self.owners = OwnerLog(clock=self._rules.clock)
        self._last_rounds: dict[PeerId, int] = {}
        """Per member, the round of the last entry for which it was present."""
        self._included_in: dict[PeerId, tuple[int, int]] = {}
        """Per member, a cycle, and a bit for it and each of the seven before: whether entries include the member."""
        self._entries_of: dict[int, int] = {}
        """Per recent round, its number of entries."""
        self._height = 0

    # -- what happens

    def note_entry(self, present: Iterable[PeerId], included: Iterable[PeerId], round_index: int) -> None:
        """Note the members that were present for an entry of a round, and those whose contributions it includes."""
        cycle = self._rules.clock.cycle(round_index)
        for peer in present:
            self._last_rounds[peer] = max(round_index, self.last_round(peer))
        for peer in included:
            last, bits = self._included_in.get(peer, (cycle, 0))
            if cycle >= last:
                bits, last = bits << min(cycle - last, CYCLES_SEEN), cycle
                bits |= 1
            elif last - cycle < CYCLES_SEEN:
                bits |= 1 << (last - cycle)
            self._included_in[peer] = (last, bits & ((1 << CYCLES_SEEN) - 1))
        self._entries_of[round_index] = self._entries_of.get(round_index, 0) + 1
        while len(self._entries_of) > self._rules.absence_rounds + 4:
            del self._entries_of[min(self._entries_of)]

    def round_over(self, round_index: int, height: int) -> list[Action]:
        """Report the owners that get no entries, after a round is over; only a peer that follows the logs can tell.

        Args:
            height: total number of entries that all spans here have absorbed.
        """
        self._height = height
        governing = self._book.governing(round_index)
        if not self._local.ready or governing is None:
            self.owners.forget()
            return []
        num_spans = self._rules.num_spans[self._rules.clock.fragment(round_index)]
        return [
            Report(
                topic="reducer-lost",
                text=f"the spans of {short_peer_id(peer)} got no entries for {IDLE_CYCLES} cycles while others' did; "
                f"it averages nothing for {LOST_CYCLES} cycles",
            )
            for peer in self.owners.round_over(round_index, num_spans, *governing)
        ]

    def keep_only(self, members: Iterable[PeerId]) -> None:
        """Drop what is known of all other peers."""
        kept = frozenset(members)
        self._last_rounds = {peer: last for peer, last in self._last_rounds.items() if peer in kept}
        self._included_in = {peer: seen for peer, seen in self._included_in.items() if peer in kept}

    # -- what the entries show

    def last_round(self, peer: PeerId) -> int:
        """Return the round of the last entry for which a member was present; -1 if there is none."""
        return self._last_rounds.get(peer, -1)

    def latest_round(self) -> int:
        """Return the round of the last entry for which any member was present; -1 if there is none."""
        return max(self._last_rounds.values(), default=-1)

    def num_entries(self, first: int, last: int) -> int:
        """Return how many entries the rounds from `first` to `last` got, as far as this peer knows."""
        return sum(num for index, num in self._entries_of.items() if first <= index <= last)

    def has_come_to_count(self, member: Member, cycle: int) -> bool:
        """Return whether entries have included a member for long enough, since its listing, to make it count."""
        last, bits = self._included_in.get(member.peer, (cycle, 0))
        cycles = (last - place for place in range(CYCLES_SEEN) if bits >> place & 1)
        return sum(max(member.since, cycle - CYCLES_SEEN) < each <= cycle for each in cycles) >= COUNTS_AFTER_CYCLES

    def num_ready(self, now: float) -> int:
        """Return how many peers that train are alive and ready, this one included.

        In a grid of several rows, all members are assumed to be. Two members that can only dial out never receive each
        other's heartbeats; the entries show whether such a member is present.
        """
        grid, roster, local = self._book.grid(), self._book.in_force, self._local
        if grid is not None and roster is not None and len(grid.rows) > 1:
            return sum(member.trains for member in roster.members)
        here = {peer for peer, beat in self._liveness.alive(now).items() if beat.ready and beat.trains}
        if local.ready and local.me.trains and not (local.leaving or local.conditions.is_paused):
            here.add(local.peer)
        clock = self._rules.clock
        since = max(clock.round_at(now) - clock.num_fragments, 0)
        members = frozenset(member.peer for member in roster.members if member.trains) if roster is not None else ()
        by_entries = {
            peer
            for peer in members
            if peer not in self._liveness.views and peer != local.peer and self.last_round(peer) >= since
        }
        return len(here | by_entries)

    # -- the view of a voter

    def view(self, parent: Roster, now: float) -> View:
        """Return this peer's view of the members of the roster in force."""
        cycle, members = self._rules.clock.cycle_at(now), parent.members
        lost, here = self.owners.lost(), self._liveness.alive(now).keys() | {self._local.peer}
        absent = self.absent(parent, now)

        def bitmap(named: Iterable[PeerId]) -> bytes:
            chosen = frozenset(named)
            return pack_included({n for n, m in enumerate(members) if m.peer in chosen}, len(members))

        return View(
            absent=bitmap(absent),
            heard=bitmap(here),
            counting=bitmap(m.peer for m in members if m.trains and not m.counts and self.has_come_to_count(m, cycle)),
            idle=bitmap(m.peer for m in members if (m.peer, m.incarnation) in lost),
            height=self._height,
            declarations=self._declarations.shown(parent, now),
        )

    def absent(self, parent: Roster, now: float) -> frozenset[PeerId]:
        """Return the members that this peer would drop: those that were present for no entry for long.

        For a member whose link was closed and not opened again, a cycle is enough, as for a killed process. If the
        spans got few entries, a member must also have sent no heartbeat for as long. If no member of a row was present,
        the row has lost its reducers, and only these are dropped.
        """
        clock, liveness = self._rules.clock, self._liveness
        current = clock.round_at(now)
        closed = frozenset(member.peer for member in parent.members if liveness.is_closed(member, now))

        def is_quiet(member: Member) -> bool:
            since = current - (clock.num_fragments if member.peer in closed else self._rules.absence_rounds)
            was_listed = max(member.since + 1, 0) * clock.num_fragments <= since
            return member.peer != self._local.peer and was_listed and self.last_round(member.peer) < since

        quiet = [member for member in parent.members if is_quiet(member)]
        first = current - clock.num_fragments
        if 2 * self.num_entries(first, current - 1) < self._rules.num_all_spans:
            return frozenset(m.peer for m in quiet if m.peer in closed or liveness.is_silent(m, now))
        _, grid = self._book.folded(parent.digest(), current)
        silent = [row for row in grid.rows if all(self.last_round(peer) < first for peer in row)]
        spared = frozenset(peer for row in silent for peer in row) if len(grid.rows) > 1 else frozenset()
        had_entries = self._had_entries(current)
        return frozenset(
            member.peer
            for member in quiet
            if (member.peer in closed or had_entries) and (member.reduces or member.peer not in spared)
        )

    def _had_entries(self, current: int) -> bool:
        """Return whether members had a chance to be present: after a stall, all of them were in no entry for long."""
        num = self.num_entries(current - self._rules.absence_rounds, current - 1)
        return 2 * num >= ABSENT_CYCLES * self._rules.num_all_spans
