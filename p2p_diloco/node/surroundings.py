"""The ports of a node: a memory that survives restarts, an observer, an archive, address books."""

from __future__ import annotations

from typing import Protocol

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.membership.histories import Liveliness
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import ReachReply, ReachRequest
from p2p_diloco.protocol.wire.roster import CertifiedRoster


class PeerMemory(Protocol):
    """Keeps what must survive a restart; each call returns when the bytes are on disk."""

    def keep_ballots(self, ballots: Ballots) -> None:
        """Keep what this peer is bound to."""
        ...

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Keep a certified roster."""
        ...

    def keep_liveliness(self, liveliness: Liveliness) -> None:
        """Keep the record of this peer's line of rosters, if the disk takes it."""
        ...


class EntryArchive(Protocol):
    """The entries that this peer absorbed, and what follows from them; on its disk."""

    def keep_entry(self, entry: Entry) -> None:
        """Keep an entry that was just absorbed, soon. Returns at once; a disk that refuses is told elsewhere."""
        ...

    def give_up(self, span: SpanId) -> None:
        """Forget the entries kept of a span, soon: it was replaced, and they may be another branch's."""
        ...

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the entry that follows `parent`, or None. Reads; for the worker."""
        ...

    def rebuild(self, span: SpanId, digest: Digest) -> SpanState | None:
        """Return the span at chain digest `digest` from what lies on the disk, or None. Computes; for the worker."""
        ...

    def rebuild_parent(self, span: SpanId, tip: Digest) -> SpanState | None:
        """Return the span before the entry that led to `tip`, from what lies on the disk, or None; for the worker."""
        ...


class NoArchive:
    """Keeps nothing: an `EntryArchive` for a peer without a disk."""

    def keep_entry(self, entry: Entry) -> None:
        """Keep nothing."""

    def give_up(self, span: SpanId) -> None:
        """Forget nothing."""

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Find nothing."""
        return None

    def rebuild(self, span: SpanId, digest: Digest) -> SpanState | None:
        """Know nothing."""
        return None

    def rebuild_parent(self, span: SpanId, tip: Digest) -> SpanState | None:
        """Know nothing."""
        return None


class SwarmObserver(Protocol):
    """Receives events."""

    def report(self, topic: str, text: str) -> None:
        """Called with a sentence about a topic."""
        ...

    def round_closed(self, closed: RoundClosed) -> None:
        """Called with the result of a round."""
        ...


class AddressBook(Protocol):
    """Knows where peers can be reached: the link keeper."""

    def introductions(self) -> tuple[bytes, ...]:
        """Return signed records to tell a new acquaintance."""
        ...

    def introduced(self, records: tuple[bytes, ...]) -> None:
        """Take records that a peer told."""
        ...


class ReachBook(Protocol):
    """Asks for proofs of reachability and gives them: the reach keeper."""

    def receive(self, peer: PeerId, message: ReachRequest | ReachReply) -> None:
        """Take a request to dial `peer` afresh, or its answer to ours."""
        ...
