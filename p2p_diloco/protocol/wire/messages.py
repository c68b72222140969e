"""The messages between peers, as frozen values with a bounded binary encoding.

Small messages use the control lane, vectors the bulk lane; see `is_bulk`. Signed values carry their own signature.
All others rely on the link, whose peer the transport has authenticated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import DIGEST_BYTES, Digest, PeerId, SpanId
from p2p_diloco.log import SpanHead
from p2p_diloco.protocol.wire.ballot import (
    PREPARE_LAYOUT,
    PROMISED_LAYOUT,
    PROPOSAL_LAYOUT,
    VOTE_LAYOUT,
    Prepare,
    Promised,
    Proposal,
    Vote,
)
from p2p_diloco.protocol.wire.entry import ENTRY_LAYOUT, HEAD_LAYOUT, MOST_PAYLOAD_BYTES, VECTOR, Entry
from p2p_diloco.protocol.wire.file_list import MOST_PIECES
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    F32,
    F64,
    FLAG,
    I64,
    PEER,
    SIGNATURE,
    SPAN,
    U8,
    U16,
    U32,
    U64,
    FrameReader,
    Layout,
    blob,
    blob_view,
    many,
    pair,
    put_fields,
    put_length,
    record,
    take_fields,
    to_bytes,
)
from p2p_diloco.protocol.wire.heartbeat import HEARTBEAT_LAYOUT, Heartbeat
from p2p_diloco.protocol.wire.member import DECLARATION_LAYOUT, Declaration
from p2p_diloco.protocol.wire.roster import CERTIFIED_LAYOUT, MOST_MEMBERS, CertifiedRoster

PROTOCOL_VERSION = 10
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

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answer to a `Ping`: the peer's clock, in seconds, when it answered.

    Attributes:
        is_settled: whether the peer has the swarm's time. A peer that has just started has only an estimate.
    """

    nonce: int
    clock_seconds: float
    is_settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRequest:
    """Request for the rosters after the first of these digests that the peer knows; for all, if it knows none."""

    known: tuple[Digest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterReply:
    """Certified rosters in chain order, parents first."""

    rosters: tuple[CertifiedRoster, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsRequest:
    """Request for the tips of a fragment's spans."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsReply:
    """Tips of a fragment's spans at the sender, in span order."""

    fragment: int
    heads: tuple[SpanHead, ...]


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
    offset: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReply:
    """A piece of a span's anchor and momentum (float32, little-endian, one after the other) at `head`.

    Attributes:
        piece: in a received message, a view of its frame.
    """

    span: SpanId
    head: SpanHead
    total_bytes: int
    offset: int
    piece: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRequest:
    """Request for the content digests of a fragment's spans."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentReply:
    """Pairs of chain digest and content digest in span order; compared only if the chain digests are equal.

    A content digest covers the bytes and the whole head.
    """

    fragment: int
    digests: tuple[tuple[Digest, Digest], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedContentRequest:
    """Request of `requester` for the signed content digests of `voter`; any peer can forward the answer.

    Attributes:
        nonce: repeated in the answer, so that an older answer cannot be passed off as this one.
    """

    fragment: int
    voter: PeerId
    requester: PeerId
    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedContent:
    """Signed answer: the digests of a `ContentReply` and the roster in force; no digests if the voter holds nothing."""

    fragment: int
    voter: PeerId
    requester: PeerId
    nonce: int
    roster: Digest
    digests: tuple[tuple[Digest, Digest], ...]
    signature: bytes

    def statement(self, run: Digest) -> bytes:
        """Return the bytes that are signed."""
        return b"content" + run + to_bytes(self, _SIGNED_CONTENT_LAYOUT[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest:
    """Request for the signed manifest of the run that this link serves."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReply:
    """The signed manifest, byte for byte."""

    manifest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Introductions:
    """Signed records of peers that the sender knows, so that a newcomer needs only the sender to find the others."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRequest:
    """Request to dial the sender over a fresh connection, at these ports of the host that the receiver sees it at."""

    nonce: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachReply:
    """Answer to a `ReachRequest`: the address that the sender dialled, and the result.

    Attributes:
        reason: why the sender could not connect; empty if it could.
        cycle, signature: those of the sender's `ReachProof` if it could connect; otherwise zeros.
    """

    nonce: int
    host: bytes
    port: int
    reason: bytes
    cycle: int
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsRequest:
    """Request for what the receiver holds of the text that the run shares."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Pieces of the text that the sender can send: bit i, counted from the lowest bit of the first byte, is piece i.

    Attributes:
        has_list: whether the sender can send the list of files.
    """

    nonce: int
    has_list: bool
    pieces: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Request for the bytes from `offset` on of a piece of the text, or of its list, named by its SHA-256."""

    digest: Digest
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """Bytes of the content with SHA-256 `digest`, from `offset` on; no bytes if the sender does not hold it.

    Attributes:
        total_bytes: length of the whole content.
        block: in a received message, a view of its frame.
    """

    digest: Digest
    total_bytes: int
    offset: int
    block: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOffer:
    """One span of an opening: its index, and the parent at which the sender holds it.

    A peer that names a parent is present in the round and counts towards the majority on that parent, even if its
    vector is late, cut off or refused.

    Attributes:
        sends: whether a vector follows; a peer with an upload cap does not send all of them.
        norm: norm of the contribution before clipping; 0 if none follows.
    """

    index: int
    parent: Digest
    sends: bool
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Begins a contribution: announces what follows for the spans of one reducer.

    Attributes:
        roster: digest of the roster that the contributor uses; it must be the reducer's.
        tokens, steps: trained for this fragment since its last snapshot.
    """

    round: int
    roster: Digest
    incarnation: int
    tokens: int
    steps: int
    spans: tuple[SpanOffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanVector:
    """One encoded span of a contribution; in a received message, `payload` is a view of its frame."""

    round: int
    span: SpanId
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMean:
    """A row's mean of one span, sent to the span's owner, with the members present, and those included with weights."""

    round: int
    span: SpanId
    roster: Digest
    parent: Digest
    row: int
    present: bytes
    included: bytes
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    tokens: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reducer's notice that a contribution does not count; `newer_roster`: the receiver's roster is outdated."""

    round: int
    newer_roster: bool
    reason: bytes


_HEAD = record(SpanHead, HEAD_LAYOUT)
_SPAN_OFFER = record(SpanOffer, (("index", U32), ("parent", DIGEST), ("sends", FLAG), ("norm", F32)))
_CERTIFIED = many(record(CertifiedRoster, CERTIFIED_LAYOUT), MOST_ROSTERS_IN_REPLY)
_PIECE = blob_view(MOST_PIECE_BYTES)
_BLOCK = blob_view(MOST_BLOCK_BYTES)
_LONG = {VECTOR: MOST_PAYLOAD_BYTES, _PIECE: MOST_PIECE_BYTES, _BLOCK: MOST_BLOCK_BYTES}
"""Maximum lengths of the fields that end a frame and are most of it."""

_ROW_MEAN_LAYOUT: Layout = (
    ("round", I64),
    ("span", SPAN),
    ("roster", DIGEST),
    ("parent", DIGEST),
    ("row", U16),
    ("present", blob(MOST_MEMBERS // 8)),
    ("included", blob(MOST_MEMBERS // 8)),
    ("weights", many(F32, MOST_MEMBERS)),
    ("norms", many(F32, MOST_MEMBERS)),
    ("tokens", U64),
    ("payload", VECTOR),
)
_DIGEST_PAIRS = many(pair(DIGEST, DIGEST), MOST_SPANS)
_HEADS = many(_HEAD, MOST_SPANS)
_SPAN_OFFERS = many(_SPAN_OFFER, MOST_SPANS)
_BYTES_OF_A_SPAN = {_DIGEST_PAIRS: 2 * DIGEST_BYTES, _HEADS: _HEAD.largest, _SPAN_OFFERS: _SPAN_OFFER.largest}
"""Length of an item of the fields that hold one for each span of a fragment."""
_SIGNED_CONTENT_LAYOUT: Layout = (
    ("fragment", U16),
    ("voter", PEER),
    ("requester", PEER),
    ("nonce", U64),
    ("roster", DIGEST),
    ("digests", _DIGEST_PAIRS),
    ("signature", SIGNATURE),
)
_OPENING_LAYOUT: Layout = (
    ("round", I64),
    ("roster", DIGEST),
    ("incarnation", U32),
    ("tokens", U64),
    ("steps", U64),
    ("spans", _SPAN_OFFERS),
)

_KINDS: dict[int, tuple[type[Any], Layout]] = {
    1: (Heartbeat, HEARTBEAT_LAYOUT),
    2: (Ping, (("nonce", U64),)),
    3: (Pong, (("nonce", U64), ("clock_seconds", F64), ("is_settled", FLAG))),
    4: (Declaration, DECLARATION_LAYOUT),
    5: (RosterRequest, (("known", many(DIGEST, MOST_ROSTERS_IN_REPLY)),)),
    6: (RosterReply, (("rosters", _CERTIFIED),)),
    7: (Promised, PROMISED_LAYOUT),
    8: (Proposal, PROPOSAL_LAYOUT),
    9: (Vote, VOTE_LAYOUT),
    10: (HeadsRequest, (("fragment", U16),)),
    11: (HeadsReply, (("fragment", U16), ("heads", _HEADS))),
    12: (EntryRequest, (("span", SPAN), ("parent", DIGEST))),
    13: (EntryAbsent, (("span", SPAN), ("parent", DIGEST))),
    14: (SpanRequest, (("span", SPAN), ("version", DIGEST), ("offset", U64), ("most_bytes", U32))),
    15: (ContentRequest, (("fragment", U16),)),
    16: (ContentReply, (("fragment", U16), ("digests", _DIGEST_PAIRS))),
    17: (ManifestRequest, (("nonce", U64),)),
    18: (ManifestReply, (("manifest", blob(MOST_MANIFEST_BYTES)),)),
    19: (Refusal, (("round", I64), ("newer_roster", FLAG), ("reason", blob(512)))),
    20: (Introductions, (("records", many(blob(MOST_RECORD_BYTES), MOST_RECORDS)),)),
    21: (Prepare, PREPARE_LAYOUT),
    22: (SignedContentRequest, (("fragment", U16), ("voter", PEER), ("requester", PEER), ("nonce", U64))),
    23: (SignedContent, _SIGNED_CONTENT_LAYOUT),
    25: (ReachRequest, (("nonce", U64), ("ports", many(U16, MOST_PORTS)))),
    26: (
        ReachReply,
        (
            ("nonce", U64),
            ("host", blob(MOST_HOST_BYTES)),
            ("port", U16),
            ("reason", blob(MOST_REASON_BYTES)),
            ("cycle", U64),
            ("signature", SIGNATURE),
        ),
    ),
    27: (HoldingsRequest, (("nonce", U64),)),
    28: (Holdings, (("nonce", U64), ("has_list", FLAG), ("pieces", blob(MOST_PIECES // 8)))),
    29: (BlockRequest, (("digest", DIGEST), ("offset", U64))),
    32: (Opening, _OPENING_LAYOUT),
    33: (SpanVector, (("round", I64), ("span", SPAN), ("payload", VECTOR))),
    34: (Entry, ENTRY_LAYOUT),
    35: (RowMean, _ROW_MEAN_LAYOUT),
    36: (SpanReply, (("span", SPAN), ("head", _HEAD), ("total_bytes", U64), ("offset", U64), ("piece", _PIECE))),
    37: (TextBlock, (("digest", DIGEST), ("total_bytes", U64), ("offset", U64), ("block", _BLOCK))),
}
_FIRST_BULK_KIND = 32
_KIND_OF = {message_class: kind for kind, (message_class, _) in _KINDS.items()}

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
    kind = _KIND_OF[type(message)]
    out = bytearray((PROTOCOL_VERSION, kind))
    layout = _KINDS[kind][1]
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
    return _KINDS[kind][0] if version == PROTOCOL_VERSION and kind in _KINDS else None


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

    return {kind: 2 + sum(largest(field) for _, field in layout) for kind, layout in _KINDS.values()}


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
    message_class, layout = _KINDS[kind]
    fields = take_fields(reader, layout)
    reader.expect_end()
    return cast(Message, message_class(**fields))
