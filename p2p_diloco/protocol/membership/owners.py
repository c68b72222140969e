"""Which owners' spans get no entries while others' do: the log is the evidence that an owner cannot do its part.

The cause does not matter: the owner is unreachable, its line is thin, or it withholds entries. It loses *reduces* for a
while. So a wrong claim of being reachable costs the spans that it owns a few cycles and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.wire.grid import Grid
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
