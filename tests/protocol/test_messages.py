"""Messages: each survives encoding and decoding, and a stranger's bytes raise only FrameError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import (
    SPAN,
    child_of,
    declaration,
    entry_on,
    founding,
    fragment_head,
    head_of,
    heartbeat,
    ids,
    member,
    roster_1,
    roster_of,
)

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import sha256
from p2p_diloco.protocol.wire.ballot import Prepare, Promise, Promised, Proposal, View, Vote
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import (
    PROTOCOL_VERSION,
    BlockRequest,
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Holdings,
    HoldingsRequest,
    Introductions,
    ManifestReply,
    ManifestRequest,
    Message,
    Opening,
    Ping,
    Pong,
    ReachReply,
    ReachRequest,
    Refusal,
    RosterReply,
    RosterRequest,
    RowMean,
    SignedContent,
    SignedContentRequest,
    SpanOffer,
    SpanReply,
    SpanRequest,
    SpanVector,
    TextBlock,
    decode_message,
    encode_message,
    is_bulk,
    kind_of,
    longest_frames,
)
from p2p_diloco.protocol.wire.peer_name import MOST_NAME_BYTES

A, B = ids(2)
D = sha256(b"digest")
ROSTER = roster_of(3)
CHILD = child_of(ROSTER, (*ROSTER.members[1:], member(A, incarnation=2, counts=False, reduces=False)), degraded=True)
VIEW = View(
    absent=b"\4",
    heard=b"\3",
    counting=b"\0",
    idle=b"\1",
    height=7,
    declarations=(declaration(A, leaving=True), declaration(B, reachable=False, share=3)),
)
PROMISE = Promise(parent=D, degraded=False, ballot=9, voted=None, view=VIEW, voter=A, signature=bytes(64))
BOUND = Promise(parent=D, degraded=True, ballot=9, voted=(4, D), view=VIEW, voter=B, signature=bytes(64))
PROPOSAL = Proposal(ballot=9, roster=CHILD, promises=(PROMISE, BOUND), origin=(PROMISE,))
MESSAGES: tuple[Message, ...] = (
    heartbeat(A, heads=(fragment_head(),), loss=1.5),
    heartbeat(B, name=b"b" * MOST_NAME_BYTES),
    Ping(nonce=7),
    Pong(nonce=7, clock_seconds=12.5),
    Pong(nonce=8, clock_seconds=12.5, is_settled=False),
    ReachRequest(nonce=7, ports=(31337, 40000)),
    ReachReply(nonce=7, host=b"192.0.2.1", port=31337, reason=b"refused", cycle=5, signature=bytes(64)),
    declaration(A, leaving=True),
    RosterRequest(known=(D,)),
    RosterReply(rosters=(founding(), roster_1(3))),
    Prepare(parent=D, degraded=True, ballot=9),
    Promised(promise=BOUND, voted=PROPOSAL),
    PROPOSAL,
    Vote(parent=D, roster=D, ballot=9, signature=bytes(64)),
    HeadsRequest(fragment=1),
    HeadsReply(fragment=1, heads=(head_of(),)),
    EntryRequest(span=SPAN, parent=D),
    EntryAbsent(span=SPAN, parent=D),
    SpanRequest(span=SPAN, version=D, offset=5, most_bytes=1 << 16),
    SpanReply(span=SPAN, head=head_of(), total_bytes=9, offset=1, piece=b"piece"),
    ContentRequest(fragment=0),
    ContentReply(fragment=0, digests=((D, D),)),
    SignedContentRequest(fragment=1, voter=A, requester=B, nonce=1 << 61),
    SignedContent(fragment=1, voter=A, requester=B, nonce=7, roster=D, digests=((D, D),), signature=bytes(64)),
    ManifestRequest(nonce=1),
    ManifestReply(manifest=b"{}"),
    Introductions(records=(b"record",)),
    HoldingsRequest(nonce=1),
    Holdings(nonce=1, has_list=True, pieces=b"\x05"),
    BlockRequest(digest=D, offset=1 << 17),
    TextBlock(digest=D, total_bytes=9, offset=1, block=b"block"),
    Refusal(round=4, newer_roster=True, reason=b"late"),
    Opening(
        round=4,
        roster=D,
        incarnation=1,
        tokens=5,
        steps=6,
        spans=(SpanOffer(index=0, parent=D, sends=True, norm=0.5), SpanOffer(index=1, parent=D, sends=False, norm=0.0)),
    ),
    SpanVector(round=4, span=SPAN, payload=b"vector"),
    entry_on(head_of(), ROSTER, A),
    RowMean(
        round=4,
        span=SPAN,
        roster=D,
        parent=D,
        row=0,
        present=b"\3",
        included=b"\1",
        weights=(1.0,),
        norms=(1.0,),
        tokens=3,
        payload=b"",
    ),
)
VECTOR = bytes(4096)
LONG_FIELDS: dict[type, str] = {SpanReply: "piece", TextBlock: "block"}
LONG_VECTORS = tuple(
    replace(message, **{LONG_FIELDS.get(type(message), "payload"): VECTOR})
    for message in MESSAGES
    if isinstance(message, SpanVector | Entry | RowMean | SpanReply | TextBlock)
)
BULK = (Opening, SpanVector, Entry, RowMean, SpanReply, TextBlock)


def test_every_kind_of_message_is_tested() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_encoding_and_decoding(message: Message) -> None:
    assert decode_message(encode_message(message)) == message
    assert is_bulk(message) is isinstance(message, BULK)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_is_truncated_or_too_long_is_refused(message: Message) -> None:
    frame = encode_message(message)
    for cut in range(len(frame)):
        with pytest.raises(FrameError):
            decode_message(frame[:cut])
    with pytest.raises(FrameError, match="too long"):
        decode_message(frame + b"\0")


@pytest.mark.parametrize("message", LONG_VECTORS, ids=lambda message: type(message).__name__)
def test_a_truncated_long_vector_is_refused(message: Message) -> None:
    frame = encode_message(message)
    for cut in (*range(512), *range(len(frame) - 512, len(frame))):
        with pytest.raises(FrameError):
            decode_message(frame[:cut])


@settings(max_examples=300)
@given(st.integers(0, 40), st.binary(max_size=400))
def test_random_bytes_only_raise_frame_errors(kind: int, body: bytes) -> None:
    try:
        message = decode_message(bytes((PROTOCOL_VERSION, kind)) + body)
    except FrameError:
        return
    assert encode_message(message) == bytes((PROTOCOL_VERSION, kind)) + body


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_flipped_byte_only_raises_frame_errors(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode_message(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_message(bytes(frame))
    except FrameError:
        return
    assert encode_message(found) == bytes(frame)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_kind_of_a_frame_is_known_by_its_head_and_bounds_its_length(message: Message) -> None:
    frame = encode_message(message)
    assert kind_of(frame[:2]) is type(message)
    assert len(frame) <= longest_frames(spans=2, payload_bytes=8)[type(message)]


def test_an_opening_and_a_vector_are_bounded_by_the_spans_of_the_run() -> None:
    offer = SpanOffer(index=0, parent=D, sends=True, norm=0.5)
    opening = Opening(round=4, roster=D, incarnation=1, tokens=5, steps=6, spans=(offer,) * 32)
    longest = longest_frames(spans=32, payload_bytes=1000)
    assert longest[Opening] == len(encode_message(opening))
    assert longest[SpanVector] == len(encode_message(SpanVector(round=4, span=SPAN, payload=bytes(1000))))
    assert longest[ContentReply] == len(encode_message(ContentReply(fragment=0, digests=((D, D),) * 32)))


@pytest.mark.parametrize("head", [b"", b"\x01", b"\xff\x01", bytes([PROTOCOL_VERSION, 255])])
def test_a_head_of_nothing_that_is_known_has_no_kind(head: bytes) -> None:
    assert kind_of(head) is None


def test_another_version_or_kind_is_named() -> None:
    with pytest.raises(
        FrameError, match=f"is of protocol version 200, but this peer uses {PROTOCOL_VERSION}; update the older one"
    ):
        decode_message(bytes((200, 1)))
    with pytest.raises(FrameError, match="of kind 200, which this peer does not know"):
        decode_message(bytes((PROTOCOL_VERSION, 200)))


@pytest.mark.parametrize("make", [heartbeat, declaration])
def test_signatures_cover_the_sender(make: Callable[..., Heartbeat | Declaration]) -> None:
    first, second = ids(2)
    assert make(first).statement() != make(second).statement()
    assert make(first).statement() != make(first, incarnation=2).statement()
