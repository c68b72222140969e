"""A heartbeat and its signature."""

from __future__ import annotations

import pytest
from fake_run import peer_id
from made import heartbeat

from p2p_diloco.errors import FrameError
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.messages import decode_message, encode_message


def test_signing_covers_all_but_the_signature_and_changes_nothing_else() -> None:
    unsigned = heartbeat(peer_id("ann"))
    asked: list[bytes] = []

    def sign(statement: bytes) -> bytes:
        asked.append(statement)
        return b"s" * 64

    signed = unsigned.signed(sign)
    assert asked == [unsigned.statement()] == [signed.statement()]
    assert signed.signature == b"s" * 64 != unsigned.signature
    received = decode_message(encode_message(signed))
    assert isinstance(received, Heartbeat)
    assert received == signed
    assert received.statement() == signed.statement()


def test_a_share_larger_than_a_full_one_is_refused() -> None:
    with pytest.raises(FrameError, match="the number 9; at most 8"):
        decode_message(encode_message(heartbeat(peer_id("ann"), share=9)))
