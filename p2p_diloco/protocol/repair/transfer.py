"""A transfer: what is fetched of a span, how long it is waited for, and the pieces that have arrived."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log.head import SpanHead
from p2p_diloco.memory.slabs import awaited_vector


class Want(enum.Enum):
    """The kind of thing that is fetched for a span."""

    ENTRY = "entry"
    SPAN = "span"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is computed in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpRules:
    """The sizes of what is fetched, and how long an answer may take.

    Attributes:
        num_spans: spans of each fragment.
        span_bytes: bytes of anchor and momentum of each span.
        answer_seconds: for digests, which take hashing.
        entry_seconds: for entries and heads.
        piece_seconds: for a piece of a span.
        piece_target_seconds: what a piece should take, so that entries do not wait long behind pieces.
        pause_seconds: after a comparison that differed, before the same peer is asked again.
        patience_seconds: for a majority that stands lower to follow entries that only we hold.
    """

    num_spans: tuple[int, ...]
    span_bytes: dict[SpanId, int]
    answer_seconds: float
    entry_seconds: float
    piece_seconds: float
    piece_target_seconds: float
    pause_seconds: float
    patience_seconds: float


class Transfer:
    """A span that is being fetched: all of one version, in one piece of memory, from the front without a gap.

    Attributes:
        began: when its first piece came.
        donors: whose pieces it is made of.
        content: content digest of what came; None until all has come and was hashed.
        named: content digest that a majority named for this head; None until one has.
        is_sure: whether that was a majority of the electorate.
    """

    __slots__ = ("began", "content", "donors", "head", "is_sure", "named", "received_bytes", "state", "total_bytes")

    def __init__(self, head: SpanHead, total_bytes: int, began: float) -> None:
        self.head = head
        self.total_bytes = total_bytes
        self.began = began
        self.received_bytes = 0
        self.donors: set[PeerId] = set()
        self.content: Digest | None = None
        self.named: Digest | None = None
        self.is_sure = False
        self.state = awaited_vector(total_bytes // 4).data.cast("B")
        """Whoever gets it at the end owns it. As long as the agreed span, whatever a donor says.

        φ and m lie in it until their first entry. Not on the heap: a newcomer's spans go one by one, and would leave
        holes there as large as all of them.
        """

    @property
    def is_whole(self) -> bool:
        """Return whether all pieces have come."""
        return self.received_bytes == self.total_bytes

    def add(self, piece: bytes | memoryview, donor: PeerId) -> None:
        """Put the next piece where it belongs."""
        self.donors.add(donor)
        end = self.received_bytes + len(piece)
        self.state[self.received_bytes : end] = piece
        self.received_bytes = end
