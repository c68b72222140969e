"""Counts bytes sent and received by purpose: vectors of rounds, control messages, transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from p2p_diloco.protocol.wire.messages import Message, Opening, SpanReply, SpanVector, TextBlock, is_bulk

Purpose = Literal["vectors", "control", "transfer"]
FRAME_PREFIX_BYTES = 4


@dataclass(slots=True)
class Traffic:
    """Bytes by purpose, including frame prefixes."""

    sent: dict[Purpose, int] = field(default_factory=lambda: {"vectors": 0, "control": 0, "transfer": 0})
    received: dict[Purpose, int] = field(default_factory=lambda: {"vectors": 0, "control": 0, "transfer": 0})

    def count_sent(self, purpose: Purpose, frame_bytes: int) -> None:
        """Count a frame that was posted."""
        self.sent[purpose] += frame_bytes + FRAME_PREFIX_BYTES

    def count_received(self, purpose: Purpose, frame_bytes: int) -> None:
        """Count a frame that was received."""
        self.received[purpose] += frame_bytes + FRAME_PREFIX_BYTES


def purpose_of(message: Message, *, on_request: bool = False) -> Purpose:
    """Return the purpose of a message; an entry sent on request is a transfer."""
    if isinstance(message, SpanReply | TextBlock) or (on_request and is_bulk(message)):
        return "transfer"
    if isinstance(message, Opening | SpanVector) or is_bulk(message):
        return "vectors"
    return "control"
