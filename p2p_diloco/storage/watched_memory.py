"""End the peer if it cannot save its ballots or rosters."""

from __future__ import annotations

from collections.abc import Callable

from p2p_diloco.errors import StateError
from p2p_diloco.node.surroundings import PeerMemory
from p2p_diloco.protocol.membership.histories import Liveliness
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.roster import CertifiedRoster


class WatchedMemory:
    """A `PeerMemory` that reports failed writes, besides raising.

    The transport swallows exceptions of its listener, because one peer's message must not stop everything. Without the
    report, the peer would continue without being able to vote, for no visible reason.

    Args:
        memory: the memory to write to.
        died: called once for each failed write.
        soon: runs functions on the writer thread, one at a time.
    """

    def __init__(
        self, memory: PeerMemory, died: Callable[[StateError], None], *, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._memory = memory
        self._died = died
        self._soon = soon

    def keep_ballots(self, ballots: Ballots) -> None:
        """Save this peer's ballots."""
        self._watch(lambda: self._memory.keep_ballots(ballots))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Save a certified roster."""
        self._watch(lambda: self._memory.keep_roster(certified))

    def keep_liveliness(self, liveliness: Liveliness) -> None:
        """Schedule saving the liveliness record: it changes every round, and correctness does not depend on it."""
        self._soon(lambda: self._memory.keep_liveliness(liveliness))

    def _watch(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except StateError as error:
            self._died(error)
            raise
