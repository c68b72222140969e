"""What a peer's shell needs around it: a memory that survives restarts, somebody who listens, an address book."""

from __future__ import annotations

from typing import Protocol

from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.ballot import Ballots
from p2p_diloco.protocol.roster import CertifiedRoster, Goodbye


class PeerMemory(Protocol):
    """What must survive a restart; each call returns when the bytes are safe."""

    def keep_ballots(self, ballots: Ballots) -> None:
        """Keep what this peer is bound to."""
        ...

    def keep_goodbye(self, goodbye: Goodbye) -> None:
        """Keep this incarnation's good-bye."""
        ...

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Keep a certified roster."""
        ...


class SwarmObserver(Protocol):
    """Who hears what happens."""

    def report(self, topic: str, text: str) -> None:
        """Hear a sentence about a topic."""
        ...

    def round_closed(self, closed: RoundClosed) -> None:
        """Hear what came of a round."""
        ...


class AddressBook(Protocol):
    """Who knows where peers can be reached: the link keeper."""

    def introductions(self) -> tuple[bytes, ...]:
        """Return signed records to tell a new acquaintance."""
        ...

    def introduced(self, records: tuple[bytes, ...]) -> None:
        """Take records that a peer told."""
        ...
