"""Messages made for tests."""

from __future__ import annotations

from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId
from p2p_diloco.protocol.heartbeat import Heartbeat
from p2p_diloco.protocol.messages import EntryRequest

BEAT = Heartbeat(
    run=ZERO_DIGEST,
    peer=PeerId(bytes(32)),
    incarnation=1,
    sequence=1,
    roster=ZERO_DIGEST,
    roster_k=0,
    included_total=0,
    heads=(),
    ready=True,
    can_be_dialled=True,
    share=8,
    trains=True,
    tokens=0,
    steps=0,
    tokens_per_second=0.0,
    loss=0.0,
    signature=bytes(64),
)
MESSAGES = (EntryRequest(span=SpanId(0, 1), parent=ZERO_DIGEST), BEAT)
