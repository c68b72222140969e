"""Stalls: cycles without entries, and when this peer continues without a majority because of them."""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.membership.declarations import Declarations
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.wire.ballot import Quorum
from p2p_diloco.protocol.wire.roster import Roster, is_majority, is_quarter

PATIENT_STALLS = 4
"""After this many stalls in a row, the remaining members may continue, however few they are."""


class Stall:
    """Counts the cycles in a row without an entry. A state machine without I/O.

    Call `round_begun` for each round, and `slept`, `waited` and `entry_absorbed` before it for what happened in the one
    before.
    """

    def __init__(self, local: LocalState, declarations: Declarations, liveness: Liveness) -> None:
        self._local = local
        self._declarations = declarations
        self._liveness = liveness
        self._rules = local.rules
        self._book = local.book
        self.cycles_without_entries = 0
        self._in_force_since = 0
        self._entries_in_cycle = 0
        self._awake_since_cycle: int | None = None
        self._steps: dict[PeerId, int] = {}

    # -- what happens

    def entry_absorbed(self) -> None:
        """Count an entry, which shows that the run is not stalled."""
        self.cycles_without_entries = 0
        self._entries_in_cycle += 1

    def waited(self) -> None:
        """Note that this peer makes no entries in this round by choice, so its cycle does not count as one without."""
        self._entries_in_cycle += 1

    def slept(self, current: int) -> None:
        """Note that the machine slept, or its clock was set, until round `current`."""
        self._awake_since_cycle = self._rules.clock.cycle(current) + 1

    def roster_entered(self, roster: Roster, now: float) -> None:
        """Begin anew under the roster that is now in force."""
        self.cycles_without_entries = 0
        self._in_force_since = max(self._rules.clock.round_at(now), self._book.last_before(roster.digest()))

    def set_back(self, now: float) -> None:
        """Remove times that are in the future, because the clock was far ahead."""
        self._in_force_since = min(self._in_force_since, self._rules.clock.round_at(now))

    def round_begun(self, before: int | None, current: int, now: float) -> None:
        """Count a cycle without entries, if this peer takes part in the run and was awake for the whole cycle.

        Two kinds of cycles do not count: those that began before the roster in force governed, because it may not have
        had a round yet, and those in which the voters are here but none of them has made a step.
        """
        clock = self._rules.clock
        cycle = clock.cycle(current)
        if before is None:
            self._awake_since_cycle = cycle + 1
        elif cycle != clock.cycle(before):
            was_awake = self._awake_since_cycle is not None and self._awake_since_cycle < cycle
            was_governed = self._in_force_since < clock.cycle(before) * clock.num_fragments
            all_idle = self._are_voters_idle(now)
            if self._has_part() and was_governed and was_awake and not self._entries_in_cycle and not all_idle:
                self.cycles_without_entries += 1
            self._entries_in_cycle = 0

    def _has_part(self) -> bool:
        """Return whether this peer is a member, or is ready and follows the members' logs."""
        return self._book.in_force is not None and (self._local.ready or self._book.lists(self._local.peer))

    def _are_voters_idle(self, now: float) -> bool:
        """Return whether more than half of the electorate is present and none of it has stepped since the last call.

        The first step compiles; that is no reason to continue without the rest.
        """
        roster, before = self._book.in_force, self._steps
        self._steps = {peer: beat.steps for peer, beat in self._liveness.alive(now).items()}
        self._steps[self._local.peer] = self._local.conditions.progress.steps
        if roster is None:
            return False
        here = roster.voters & self._steps.keys()
        have_moved = any(self._steps[peer] != before.get(peer, 0) for peer in here)
        return 2 * len(here) > len(roster.voters) and not have_moved

    # -- what follows

    def continues(self) -> bool:
        """Return whether this peer continues without a majority, after too many cycles without an entry while awake.

        Never if the roster in force has one member: that one is a majority, however long it has waited for others. The
        bootstrap peer cannot train, so it waits for an application of a peer that can.
        """
        roster = self._book.in_force
        if roster is None or self.cycles_without_entries < self._rules.stalled_cycles or len(roster.members) == 1:
            return False
        may_train = self._local.me.trains or self._declarations.has_application(roster)
        return self._book.lists(self._local.peer) and may_train

    def confirms(self, roster: Roster) -> bool:
        """Return whether this peer is stalled or, if it is not a member, has had no entries for as long.

        Two members that cannot reach each other may both have a link only to such a peer, which forwards rosters.
        """
        if roster.member(self._local.peer) is not None:
            return self.continues()
        return self._local.ready and self.cycles_without_entries >= self._rules.stalled_cycles

    def is_long(self) -> bool:
        """Return whether the stall is so long that any members may continue, however few they are."""
        return self.cycles_without_entries >= PATIENT_STALLS * self._rules.stalled_cycles

    def quorum(self, parent: Roster, *, degraded: bool) -> Quorum:
        """Return the quorum for a child of `parent`; after a long stall, any members are enough."""
        if not degraded:
            return lambda peers: is_majority(parent, peers)
        is_long = self.is_long()
        return lambda peers: is_quarter(parent, peers) or (is_long and not parent.peers().isdisjoint(peers))
