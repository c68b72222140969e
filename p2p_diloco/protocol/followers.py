"""Who is fetching the state from this peer: a founder holds it for them, a member that is alone waits for them.

A thin line cannot hand out a state and, round by round, what follows it. Were its owner ready first, it would go on by
itself, and nobody could ever catch up with it. What it waits with are entries, not steps: its island trains on.
"""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.rules import RunRules

QUIET_SILENCES = 2.0
"""Of `silence_seconds`: who has asked for nothing for so long fetches nothing any more."""
TIMES_RETAINED = 4
"""Of the cycles whose entries are kept: so long a lone member waits in all, whoever asks."""


class Followers:
    """Those that fetch spans and entries here. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self._rules = rules
        self._membership = membership
        self._asked_at: dict[PeerId, float] = {}
        self._rounds_left = self._most_rounds()

    def asked(self, peer: PeerId, now: float) -> None:
        """Note that a peer has asked for a span or an entry."""
        self._asked_at[peer] = now

    def are_fetching(self, now: float) -> bool:
        """Tell whether somebody that trains and is not ready yet has asked for something a moment ago."""
        since = now - QUIET_SILENCES * self._rules.silence_seconds
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if at > since}
        alive = self._membership.alive(now)
        return any(peer in alive and alive[peer].trains and not alive[peer].ready for peer in self._asked_at)

    def wait_for(self, now: float) -> tuple[bool, list[Action]]:
        """Tell, when a round begins, whether this peer makes no entries in it, and say so of the first such round.

        Only where it is the one member: nobody else waits for an entry then. Not for ever: of strangers, some may never
        have enough.
        """
        fetching = self.are_fetching(now)
        roster, me = self._membership.book.in_force, self._membership.me
        if roster is None or roster.peers() != {me.peer} or not me.trains:
            self._rounds_left = self._most_rounds()
            return False, []
        if self._rounds_left <= 0 or not fetching:
            return False, []
        is_first = self._rounds_left == self._most_rounds()
        self._rounds_left -= 1
        text = "alone, with others catching up: training goes on, entries wait for them"
        return True, [Report(topic="waiting", text=text)] if is_first else []

    def _most_rounds(self) -> int:
        return TIMES_RETAINED * self._rules.retained_cycles * self._rules.clock.num_fragments
