"""A transfer: what is fetched for a span, how long answers may take, and the pieces that have arrived."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log import SpanHead
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
        num_spans: number of spans of each fragment.
        span_bytes: bytes of anchor and momentum of each span.
        answer_seconds: time limit for digests, which must be computed first.
        entry_seconds: time limit for entries and heads.
        piece_seconds: time limit for a piece of a span.
        piece_target_seconds: time that a piece should take, so that entries do not wait long for pieces.
        pause_seconds: time after a comparison that differed before the same peer is asked again.
        patience_seconds: time for a majority at a lower tip to follow entries that only this peer holds.
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
    """A span that is being fetched: one version, in one block of memory, filled from the front without gaps.

    Attributes:
        began: when its first piece arrived.
        donors: peers that sent its pieces.
        content: content digest of the whole span; None until all pieces have arrived and were hashed.
        named: content digest that a majority named for this head; None until then.
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
        """The bytes of the span. Its length is that of the agreed span, whatever a donor claims. The receiver owns it.

        φ and m stay in it until their first entry. It is not on the heap: a newcomer's spans are freed one by one, and
        would leave holes there as large as all of them.
        """

    @property
    def is_whole(self) -> bool:
        """Return whether all pieces have arrived."""
        return self.received_bytes == self.total_bytes

    def add(self, piece: bytes | memoryview, donor: PeerId) -> None:
        """Append the next piece."""
        self.donors.add(donor)
        end = self.received_bytes + len(piece)
        self.state[self.received_bytes : end] = piece
        self.received_bytes = end
