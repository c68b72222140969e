"""A peer that cannot keep what it is bound to must end, whichever message of whichever peer made it try."""

from __future__ import annotations

from collections.abc import Callable

from p2p_diloco.errors import StateError
from p2p_diloco.node.surroundings import PeerMemory
from p2p_diloco.protocol.membership.histories import Liveliness
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.roster import CertifiedRoster


class WatchedMemory:
    """A `PeerMemory` that tells of a disk that refuses, beside raising.

    The transport keeps what its listener raises to itself, for one peer's bytes must not take down everything; the
    peer would live on without a vote, and nobody would know why.

    Args:
        memory: what keeps.
        died: told once for each refusal.
        soon: runs a function on the thread that writes, one after the other.
    """

    def __init__(
        self, memory: PeerMemory, died: Callable[[StateError], None], *, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._memory = memory
        self._died = died
        self._soon = soon

    def keep_ballots(self, ballots: Ballots) -> None:
        """Keep what this peer is bound to."""
        self._watch(lambda: self._memory.keep_ballots(ballots))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Keep a certified roster."""
        self._watch(lambda: self._memory.keep_roster(certified))

    def keep_liveliness(self, liveliness: Liveliness) -> None:
        """Keep the record of this peer's line of rosters, soon: it changes each round, and no promise depends on it."""
        self._soon(lambda: self._memory.keep_liveliness(liveliness))

    def _watch(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except StateError as error:
            self._died(error)
            raise
