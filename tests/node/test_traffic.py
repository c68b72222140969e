"""Bytes counted by purpose."""

from __future__ import annotations

import pytest

from p2p_diloco.ids import ZERO_DIGEST, SpanId
from p2p_diloco.node.node import FRAME_PREFIX_BYTES, Purpose, Traffic, purpose_of
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import (
    Message,
    Opening,
    Ping,
    RowMean,
    SpanReply,
    SpanRequest,
    SpanVector,
    TextBlock,
)
from p2p_diloco.span_log import SpanHead

SPAN = SpanId(0, 0)
HEAD = SpanHead(digest=ZERO_DIGEST, height=0, round=-1, roster=ZERO_DIGEST, radius=0.0, median_weight=0.0)
ENTRY = Entry(
    run=ZERO_DIGEST, round=0, span=SPAN, parent=ZERO_DIGEST, height=1, roster=ZERO_DIGEST, present=b"\x01",
    included=b"\x01", weights=(1.0,), tokens=1, median_norm=1.0, median_weight=1.0, payload=b"", signature=bytes(64),
)  # fmt: skip
MEAN = RowMean(
    round=0, span=SPAN, roster=ZERO_DIGEST, parent=ZERO_DIGEST, row=0, present=b"\x01", included=b"\x01",
    weights=(1.0,), norms=(1.0,), tokens=1, payload=b"",
)  # fmt: skip
OPENING = Opening(round=0, roster=ZERO_DIGEST, incarnation=1, tokens=1, steps=1, spans=())


@pytest.mark.parametrize(
    ("message", "purpose"),
    [
        (OPENING, "vectors"),
        (SpanVector(round=0, span=SPAN, payload=b""), "vectors"),
        (ENTRY, "vectors"),
        (MEAN, "vectors"),
        (SpanReply(span=SPAN, head=HEAD, total_bytes=1, offset=0, piece=b""), "transfer"),
        (TextBlock(digest=HEAD.digest, total_bytes=1, offset=0, block=b"t"), "transfer"),
        (SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16), "control"),
        (Ping(nonce=0), "control"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_message_has_one_purpose(message: Message, purpose: Purpose) -> None:
    assert purpose_of(message) == purpose


def test_a_requested_entry_is_a_transfer() -> None:
    assert purpose_of(ENTRY, on_request=True) == "transfer"
    assert purpose_of(Ping(nonce=0), on_request=True) == "control"


def test_frames_are_counted_with_their_prefix_in_each_direction() -> None:
    traffic = Traffic()
    traffic.count_sent("vectors", 100)
    traffic.count_sent("vectors", 10)
    traffic.count_received("control", 7)
    assert traffic.sent == {"vectors": 110 + 2 * FRAME_PREFIX_BYTES, "control": 0, "transfer": 0}
    assert traffic.received == {"vectors": 0, "control": 7 + FRAME_PREFIX_BYTES, "transfer": 0}
