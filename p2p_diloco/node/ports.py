"""The ports of a node: the outer state, memory that survives restarts, an archive, an observer, a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2p_diloco.errors import FrameError, NonFiniteUpdate, StateError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.file_list import FileList
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span_log import AbsorbedEntry

Answer = Callable[[FragmentContribution | None], None]
SpanDamaged = Callable[[SpanId, str], None]
"""Called in the loop when a span could not follow a valid entry, with the reason."""
MEMORY_ERRORS = (FrameError, NonFiniteUpdate, StateError)
"""Errors that show damaged memory when they come from a valid entry: a sound state follows every valid entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanUpdate:
    """A valid entry on its way to the outer state; updates of one span arrive in parent order."""

    span: SpanId
    absorbed: AbsorbedEntry
    payload: bytes | memoryview
    own_included: bool


class Replica(Protocol):
    """This peer's outer state, which the training side holds; the node never sees θ.

    Called from the event loop; every call returns immediately and leaves the work to the replica's own thread.
    """

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the current state of a span: frozen, so that it can be read while the replica moves on.

        Also None if memory is damaged: the span could not follow a valid entry, and stops until `replace` repairs it.
        """

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Take a transferred span at the next step border, before updates that are passed later."""

    def request_contribution(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Make this peer's contribution to a round at the next step border and pass it to `answer`, in the loop.

        `spans` are the spans of the fragment to contribute; None: all. The others stay for a later round.
        `deadline` is in swarm seconds. After it, or if there is nothing to contribute, `answer` is called with None.
        """

    def progress(self) -> Progress:
        """Return what heartbeats report about this island."""


class PeerMemory(Protocol):
    """Stores what must survive a restart; each call returns once the bytes are on disk."""

    def keep_ballots(self, ballots: Ballots) -> None:
        """Store the promises and votes that bind this peer."""

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Store a certified roster."""

    def keep_activity(self, activity: Activity) -> None:
        """Store the record of this peer's line of rosters, if the disk accepts it."""


class EntryArchive(Protocol):
    """The entries that this peer has absorbed, on its disk, and the spans that can be rebuilt from them."""

    def keep_entry(self, entry: Entry) -> None:
        """Store an entry that was just absorbed, soon. Returns immediately; disk errors are reported elsewhere."""

    def give_up(self, span: SpanId) -> None:
        """Drop the stored entries of a span, soon: it was replaced, so they may belong to another branch."""

    def distrust(self, span: SpanId, height: int, *, is_mended: bool) -> None:
        """Rebuild a span from no checkpoint up to `height`: its bytes were wrong, and may be wrong there too.

        Args:
            is_mended: whether it was rebuilt here; then the checkpoint that was used stays trusted.
        """

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the entry that follows `parent`, or None. Reads the disk; call it on the worker."""

    def rebuild(self, span: SpanId, digest: Digest) -> SpanState | None:
        """Return the span at chain digest `digest`, rebuilt from disk, or None. Computes; call it on the worker."""

    def rebuild_parent(self, span: SpanId, tip: Digest) -> SpanState | None:
        """Return the span before the entry that led to `tip`, rebuilt from disk, or None; call it on the worker."""


class SwarmObserver(Protocol):
    """Receives events."""

    def report(self, topic: str, text: str) -> None:
        """Called with the topic and the text of an event."""

    def round_closed(self, closed: RoundClosed) -> None:
        """Called with the result of a round."""


class TextCopy(Protocol):
    """This peer's copy of the text that the run shares, complete or not. Sets of pieces are sets of bits.

    Attributes:
        digest: digest of the list of files.
        listed: the list, once it is here.
        is_fetched: whether missing pieces are fetched from other peers.
        has_room_for_all: whether the whole text is fetched, and not only the pieces that are wanted.
        held: pieces that are here and were right when last read. May be read from any thread.
        unchecked: pieces that an earlier start has written.
        wanted: pieces to fetch before all others.
    """

    digest: Digest
    listed: FileList | None
    is_fetched: bool
    has_room_for_all: bool
    held: int
    unchecked: int
    wanted: int

    def adopt(self, encoded: bytes | bytearray) -> bool:
        """Store the list; return False if it has another digest. Uses the disk; call it on the worker."""

    def check(self, piece: int) -> None:
        """Read a piece of an earlier start, which is then held or missing; call it on the worker."""

    def keep(self, piece: int, content: bytes | bytearray) -> bool:
        """Store a piece; return False if it has another digest. Uses the disk; call it on the worker."""

    def read(self, digest: Digest, offset: int, most_bytes: int) -> tuple[int, bytes]:
        """Return the length of the content with this digest, and bytes of it; (0, b"") if it is not here.

        Reads the disk, and checks the bytes; call it on the worker.
        """
