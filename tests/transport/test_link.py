"""Limits, counters and texts shared by both transports."""

from __future__ import annotations

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.transport.link import (
    Lane,
    TransportCounters,
    TransportLimits,
    TransportListener,
    frame_too_long,
)


def test_each_lane_has_its_own_bounds() -> None:
    limits = TransportLimits(control_frame_bytes=1, bulk_frame_bytes=2, control_queue_bytes=3, bulk_queue_bytes=4)
    assert [limits.frame_bytes(lane) for lane in (Lane.CONTROL, Lane.BULK)] == [1, 2]
    assert [limits.queue_bytes(lane) for lane in (Lane.CONTROL, Lane.BULK)] == [3, 4]


def test_each_lane_has_its_own_counters() -> None:
    counters = TransportCounters()
    counters.lane(Lane.BULK).frames_sent += 1
    assert (counters.control.frames_sent, counters.bulk.frames_sent) == (0, 1)


def test_the_text_about_a_long_frame_names_its_sender_and_the_bounds() -> None:
    text = frame_too_long(PeerId(bytes(32)), Lane.CONTROL, 2**31, 4096)
    name = short_peer_id(PeerId(bytes(32)))
    assert text == f"{name} announced a control frame of 2147483648 bytes where 1 to 4096 are allowed"


def test_a_listener_that_overrides_nothing_accepts_everything() -> None:
    listener = TransportListener()
    peer = PeerId(sha256(b"peer"))
    listener.link_up(peer)
    listener.frame_received(peer, Lane.CONTROL, b"frame")
    listener.link_lost(peer, "reason")
    listener.transport_lost(NetworkError("gone"))
