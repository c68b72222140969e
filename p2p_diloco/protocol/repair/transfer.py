"""A span that is fetched: the request under way, and the pieces that have arrived."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log.head import SpanHead
from p2p_diloco.memory.slabs import awaited_vector
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.wire.messages import (
    ContentRequest,
    EntryRequest,
    HeadsRequest,
    SignedContentRequest,
    SpanRequest,
)

Question = HeadsRequest | ContentRequest | SignedContentRequest | EntryRequest | SpanRequest


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
        entry_seconds: time limit for entries and tips.
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

    def send(self, to: PeerId, question: Question, now: float) -> Send:
        return Send(to=to, message=question, deadline=now + self.answer_seconds)


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
        return self.received_bytes == self.total_bytes

    def add(self, piece: bytes | memoryview, donor: PeerId) -> None:
        self.donors.add(donor)
        end = self.received_bytes + len(piece)
        self.state[self.received_bytes : end] = piece
        self.received_bytes = end

    def hashed(self, content: Digest) -> None:
        self.content = content

    def name(self, content: Digest | None, *, is_sure: bool) -> None:
        """Note the content digest that others named; None: too few agree."""
        self.named, self.is_sure = content, is_sure


@dataclass(slots=True, kw_only=True)
class Request:
    """A request under way since `at`. Its time limit `until` may be extended up to `last`.

    Attributes:
        piece_bytes: the size requested.
    """

    donor: PeerId
    at: float
    until: float
    last: float
    piece_bytes: int

    def extend(self, until: float) -> None:
        """Extend the time limit, because its donor answers other requests."""
        self.until = max(min(until, self.last), self.until)


@dataclass(slots=True, kw_only=True)
class SpanFetch:
    """A span, or the entry after its tip, that is being fetched.

    Attributes:
        donor: the donor to ask first; None: any.
        may_go_back: whether a transfer may undo entries, because those that were followed have a lower tip.
        is_overruled: whether a majority holds other bytes than this peer. An older version is accepted then.
        trusted: a peer whose answer about the bytes is enough.
        request: the request under way.
        first_at: when an unanswered request was first sent.
        transfer: the pieces of a whole span that have arrived.
        servers: donors that were asked for a whole span; pieces are accepted from them.
        late: the donor that answered too late, or not at all.
    """

    want: Want
    donor: PeerId | None
    may_go_back: bool = False
    is_overruled: bool = False
    trusted: PeerId | None = None
    request: Request | None = None
    first_at: float | None = None
    transfer: Transfer | None = None
    servers: set[PeerId] = field(default_factory=set)
    late: PeerId | None = None

    def is_asked_of(self, donor: PeerId) -> bool:
        return self.request is not None and self.request.donor == donor

    def ask(self, request: Request) -> None:
        self.request = request
        self.first_at = self.first_at if self.first_at is not None else request.at
        if self.want is Want.SPAN:
            self.servers.add(request.donor)

    def cancel(self) -> None:
        self.request = None

    def time_out(self) -> None:
        assert self.request is not None, "only a request under way times out"
        self.late = self.request.donor
        self.donor = None if self.donor == self.late else self.donor
        self.request = None

    def lose(self, donor: PeerId) -> None:
        if self.is_asked_of(donor):
            self.request = self.first_at = None

    def answered(self, now: float) -> float | None:
        """Return how long an answer took since it was first requested; None if that is known already."""
        took_seconds = now - self.first_at if self.first_at is not None else None
        self.first_at = None
        return took_seconds

    def begin(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def refuse(self, donor: PeerId) -> None:
        """Take no more pieces from a donor. A transfer that it has no part in stays: it may send anything."""
        self.servers.discard(donor)
        if self.is_asked_of(donor) or (self.transfer is not None and donor in self.transfer.donors):
            self.transfer = self.request = self.donor = None

    def stay_ahead(self) -> None:
        """Undo no entries any more: the tip has moved since."""
        self.may_go_back = False
