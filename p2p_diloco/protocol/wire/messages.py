"""The messages between peers, as frozen values with a bounded binary encoding.

Small messages use the control lane, vectors the bulk lane; see `is_bulk`. Signed values carry their own signature.
All others rely on the link, whose peer the transport has authenticated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import DIGEST_BYTES, Digest, PeerId, SpanId
from p2p_diloco.protocol.wire.ballot import (
    Prepare,
    Promised,
    Proposal,
    Vote,
)
from p2p_diloco.protocol.wire.entry import HEAD_LAYOUT, MOST_PAYLOAD_BYTES, VECTOR, Entry
from p2p_diloco.protocol.wire.file_list import MOST_PIECES
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    F32,
    F64,
    I64,
    SIGNATURE,
    U8,
    U16,
    U32,
    U64,
    FrameReader,
    blob,
    blob_view,
    layout_of,
    many,
    pair,
    put_fields,
    put_length,
    record,
    signed_bytes,
    take_value,
)
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.roster import MOST_MEMBERS, CertifiedRoster
from p2p_diloco.span_log import SpanHead

PROTOCOL_VERSION = 11
MOST_SPANS = 1 << 16
MOST_PIECE_BYTES = 1 << 20
"""Maximum bytes of a span in one frame. Each piece costs both ends a fraction of a millisecond, whatever its length, so
longer pieces would save next to nothing."""
MOST_MANIFEST_BYTES = 1 << 16
MOST_ROSTERS_IN_REPLY = 64
MOST_RECORDS, MOST_RECORD_BYTES = 64, 2048
MOST_PORTS, MOST_HOST_BYTES, MOST_REASON_BYTES = 3, 64, 256
MOST_BLOCK_BYTES = 1 << 17
"""Maximum bytes of a text in one frame: a twentieth of a second of a line of 20 Mbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Request for the peer's clock; the answer repeats `nonce`."""

    nonce: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answer to a `Ping`: the peer's clock, in seconds, when it answered.

    Attributes:
        is_settled: whether the peer has the swarm's time. A peer that has just started has only an estimate.
    """

    nonce: Annotated[int, U64]
    clock_seconds: Annotated[float, F64]
    is_settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRequest:
    """Request for the rosters after the first of these digests that the peer knows; for all, if it knows none."""

    known: Annotated[tuple[Digest, ...], many(DIGEST, MOST_ROSTERS_IN_REPLY)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterReply:
    """Certified rosters in chain order, parents first."""

    rosters: Annotated[tuple[CertifiedRoster, ...], many(record(CertifiedRoster), MOST_ROSTERS_IN_REPLY)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsRequest:
    """Request for the tips of a fragment's spans."""

    fragment: Annotated[int, U16]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsReply:
    """Tips of a fragment's spans at the sender, in span order."""

    fragment: Annotated[int, U16]
    heads: Annotated[tuple[SpanHead, ...], _HEADS]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRequest:
    """Request for the entry of `span` whose parent is `parent`."""

    span: SpanId
    parent: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryAbsent:
    """Answer of a peer that does not hold the requested entry: it is too old, or of another branch."""

    span: SpanId
    parent: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRequest:
    """Request for a piece of a span's bytes; `version` is the chain digest of the pieces so far, or zeros.

    A donor sends at most `most_bytes`, and may send less.
    """

    span: SpanId
    version: Digest
    offset: Annotated[int, U64]
    most_bytes: Annotated[int, U32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReply:
    """A piece of a span's anchor and momentum (float32, little-endian, one after the other) at `head`.

    Attributes:
        piece: in a received message, a view of its frame.
    """

    span: SpanId
    head: Annotated[SpanHead, _HEAD]
    total_bytes: Annotated[int, U64]
    offset: Annotated[int, U64]
    piece: Annotated[bytes | memoryview, _PIECE]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRequest:
    """Request for the content digests of a fragment's spans."""

    fragment: Annotated[int, U16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentReply:
    """Pairs of chain digest and content digest in span order; compared only if the chain digests are equal.

    A content digest covers the bytes and the whole head.
    """

    fragment: Annotated[int, U16]
    digests: Annotated[tuple[tuple[Digest, Digest], ...], _DIGEST_PAIRS]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedContentRequest:
    """Request of `requester` for the signed content digests of `voter`; any peer can forward the answer.

    Attributes:
        nonce: repeated in the answer, so that an older answer cannot be passed off as this one.
    """

    fragment: Annotated[int, U16]
    voter: PeerId
    requester: PeerId
    nonce: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedContent:
    """Signed answer: the digests of a `ContentReply` and the roster in force; no digests if the voter holds nothing."""

    fragment: Annotated[int, U16]
    voter: PeerId
    requester: PeerId
    nonce: Annotated[int, U64]
    roster: Digest
    digests: Annotated[tuple[tuple[Digest, Digest], ...], _DIGEST_PAIRS]
    signature: Annotated[bytes, SIGNATURE]

    def statement(self, run: Digest) -> bytes:
        """Return the bytes that are signed."""
        return b"content" + run + signed_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest:
    """Request for the signed manifest of the run that this link serves."""

    nonce: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReply:
    """The signed manifest, byte for byte."""

    manifest: Annotated[bytes, blob(MOST_MANIFEST_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Introductions:
    """Signed records of peers that the sender knows, so that a newcomer needs only the sender to find the others."""

    records: Annotated[tuple[bytes, ...], many(blob(MOST_RECORD_BYTES), MOST_RECORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRequest:
    """Request to dial the sender over a fresh connection, at these ports of the host that the receiver sees it at."""

    nonce: Annotated[int, U64]
    ports: Annotated[tuple[int, ...], many(U16, MOST_PORTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachReply:
    """Answer to a `ReachRequest`: the address that the sender dialled, and the result.

    Attributes:
        reason: why the sender could not connect; empty if it could.
        cycle, signature: those of the sender's `ReachProof` if it could connect; otherwise zeros.
    """

    nonce: Annotated[int, U64]
    host: Annotated[bytes, blob(MOST_HOST_BYTES)]
    port: Annotated[int, U16]
    reason: Annotated[bytes, blob(MOST_REASON_BYTES)]
    cycle: Annotated[int, U64]
    signature: Annotated[bytes, SIGNATURE]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsRequest:
    """Request for what the receiver holds of the text that the run shares."""

    nonce: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Pieces of the text that the sender can send: bit i, counted from the lowest bit of the first byte, is piece i.

    Attributes:
        has_list: whether the sender can send the list of files.
    """

    nonce: Annotated[int, U64]
    has_list: bool
    pieces: Annotated[bytes, blob(MOST_PIECES // 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Request for the bytes from `offset` on of a piece of the text, or of its list, named by its SHA-256."""

    digest: Digest
    offset: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """Bytes of the content with SHA-256 `digest`, from `offset` on; no bytes if the sender does not hold it.

    Attributes:
        total_bytes: length of the whole content.
        block: in a received message, a view of its frame.
    """

    digest: Digest
    total_bytes: Annotated[int, U64]
    offset: Annotated[int, U64]
    block: Annotated[bytes | memoryview, _BLOCK]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOffer:
    """One span of an opening: its index, and the parent at which the sender holds it.

    A peer that names a parent is present in the round and counts towards the majority on that parent, even if its
    vector is late, cut off or refused.

    Attributes:
        sends: whether a vector follows; a peer with an upload cap does not send all of them.
        norm: norm of the contribution before clipping; 0 if none follows.
    """

    index: Annotated[int, U32]
    parent: Digest
    sends: bool
    norm: Annotated[float, F32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Begins a contribution: announces what follows for the spans of one reducer.

    Attributes:
        roster: digest of the roster that the contributor uses; it must be the reducer's.
        tokens, steps: trained for this fragment since its last snapshot.
    """

    round: Annotated[int, I64]
    roster: Digest
    incarnation: Annotated[int, U32]
    tokens: Annotated[int, U64]
    steps: Annotated[int, U64]
    spans: Annotated[tuple[SpanOffer, ...], _SPAN_OFFERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanVector:
    """One encoded span of a contribution; in a received message, `payload` is a view of its frame."""

    round: Annotated[int, I64]
    span: SpanId
    payload: Annotated[bytes | memoryview, VECTOR]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMean:
    """A row's mean of one span, sent to the span's owner, with the members present, and those included with weights."""

    round: Annotated[int, I64]
    span: SpanId
    roster: Digest
    parent: Digest
    row: Annotated[int, U16]
    present: Annotated[bytes, blob(MOST_MEMBERS // 8)]
    included: Annotated[bytes, blob(MOST_MEMBERS // 8)]
    weights: Annotated[tuple[float, ...], many(F32, MOST_MEMBERS)]
    norms: Annotated[tuple[float, ...], many(F32, MOST_MEMBERS)]
    tokens: Annotated[int, U64]
    payload: Annotated[bytes | memoryview, VECTOR]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reducer's notice that a contribution does not count; `newer_roster`: the receiver's roster is outdated."""

    round: Annotated[int, I64]
    newer_roster: bool
    reason: Annotated[bytes, blob(512)]


_HEAD = record(SpanHead, HEAD_LAYOUT)
_PIECE = blob_view(MOST_PIECE_BYTES)
_BLOCK = blob_view(MOST_BLOCK_BYTES)
_LONG = {VECTOR: MOST_PAYLOAD_BYTES, _PIECE: MOST_PIECE_BYTES, _BLOCK: MOST_BLOCK_BYTES}
"""Maximum lengths of the fields that end a frame and are most of it."""

_DIGEST_PAIRS = many(pair(DIGEST, DIGEST), MOST_SPANS)
_HEADS = many(_HEAD, MOST_SPANS)
_SPAN_OFFERS = many(record(SpanOffer), MOST_SPANS)
_BYTES_OF_A_SPAN = {_DIGEST_PAIRS: 2 * DIGEST_BYTES, _HEADS: _HEAD.largest, _SPAN_OFFERS: record(SpanOffer).largest}
"""Length of an item of the fields that hold one for each span of a fragment."""

_KINDS: dict[int, type[Any]] = {
    1: Heartbeat,
    2: Ping,
    3: Pong,
    4: Declaration,
    5: RosterRequest,
    6: RosterReply,
    7: Promised,
    8: Proposal,
    9: Vote,
    10: HeadsRequest,
    11: HeadsReply,
    12: EntryRequest,
    13: EntryAbsent,
    14: SpanRequest,
    15: ContentRequest,
    16: ContentReply,
    17: ManifestRequest,
    18: ManifestReply,
    19: Refusal,
    20: Introductions,
    21: Prepare,
    22: SignedContentRequest,
    23: SignedContent,
    25: ReachRequest,
    26: ReachReply,
    27: HoldingsRequest,
    28: Holdings,
    29: BlockRequest,
    32: Opening,
    33: SpanVector,
    34: Entry,
    35: RowMean,
    36: SpanReply,
    37: TextBlock,
}
_FIRST_BULK_KIND = 32
_KIND_OF = {message_class: kind for kind, message_class in _KINDS.items()}

Message = (
    Heartbeat | Ping | Pong | Declaration | RosterRequest | RosterReply | Prepare | Promised | Proposal | Vote
    | HeadsRequest | HeadsReply | EntryRequest | EntryAbsent | SpanRequest | SpanReply | ContentRequest | ContentReply
    | SignedContentRequest | SignedContent | ManifestRequest | ManifestReply | Introductions | Refusal
    | ReachRequest | ReachReply | HoldingsRequest | Holdings | BlockRequest | TextBlock
    | Opening | SpanVector | Entry | RowMean
)  # fmt: skip


def is_bulk(message: Message) -> bool:
    """Return whether a message uses the bulk lane."""
    return is_bulk_kind(type(message))


def is_bulk_kind(kind: type[Message]) -> bool:
    """Return whether messages of this kind use the bulk lane."""
    return _KIND_OF[kind] >= _FIRST_BULK_KIND


def encode_message(message: Message) -> bytes:
    """Return the frame of a message: version, kind, fields."""
    return b"".join(message_parts(message))


def message_parts(message: Message) -> tuple[bytearray, bytes | memoryview]:
    """Return the frame of a message in two parts, so that they need not be joined: the second is its vector, if any."""
    out, layout = bytearray((PROTOCOL_VERSION, _KIND_OF[type(message)])), layout_of(type(message))
    name, last = layout[-1]
    if last not in _LONG:
        put_fields(out, message, layout)
        return out, b""
    put_fields(out, message, layout[:-1])
    vector = getattr(message, name)
    put_length(out, len(vector), _LONG[last])
    return out, vector


def kind_of(head: bytes | bytearray | memoryview) -> type[Message] | None:
    """Return the kind of a frame by its first two bytes; None if `decode_message` would refuse them."""
    version, kind = head[:2] if len(head) >= 2 else (0, 0)
    return _KINDS[kind] if version == PROTOCOL_VERSION and kind in _KINDS else None


def longest_frames(*, spans: int, payload_bytes: int) -> dict[type[Message], int]:
    """Return the maximum length of a frame of each kind in a run.

    Args:
        spans: maximum number of spans of a fragment.
        payload_bytes: maximum length of an encoded vector.
    """

    def largest(field: Any) -> int:
        if field in _BYTES_OF_A_SPAN:
            return 4 + spans * _BYTES_OF_A_SPAN[field]
        return 4 + payload_bytes if field is VECTOR else int(field.largest)

    return {kind: 2 + sum(largest(field) for _, field in layout_of(kind)) for kind in _KINDS.values()}


def decode_message(frame: bytes | bytearray | memoryview) -> Message:
    """Read a frame.

    Raises:
        FrameError: the frame is of another version or kind, too short, too long, or holds an impossible value.
    """
    reader = FrameReader(frame)
    version, kind = U8.take(reader), U8.take(reader)
    if version != PROTOCOL_VERSION:
        raise FrameError(
            f"frame is of protocol version {version}, but this peer uses {PROTOCOL_VERSION}; update the older one"
        )
    if kind not in _KINDS:
        raise FrameError(f"frame is of kind {kind}, which this peer does not know")
    message = take_value(reader, _KINDS[kind])
    reader.expect_end()
    return cast(Message, message)
