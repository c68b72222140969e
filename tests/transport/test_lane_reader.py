"""The reader of one stream keeps the cap and the pace of its lane, and blames no peer for them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.rate import WIRE_SHARE
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.framing import LaneStream, reading_of
from p2p_diloco.transport.link import KIB, MIB, Lane, TransportLimits
from p2p_diloco.transport.rate_limit import Pace
from p2p_diloco.transport.stream_link import CONTROL_BURST_SECONDS, LaneReader
from tests.transport.stage import FakeStream

PEER = PeerId(sha256(b"peer"))
RATE = 100.0 * KIB


def now() -> float:
    return asyncio.get_running_loop().time()


def make(lane: Lane, limits: TransportLimits, **more: Any) -> tuple[FakeStream, LaneReader]:
    connection = FakeStream()
    pace = Pace(limits.download_bytes_per_second)
    stream = LaneStream(lane, cast(ByteStream, connection))
    return connection, LaneReader(PEER, stream, **{"limits": limits, "pace": pace, **more})


def feed(reader: FakeStream, *frames: bytes) -> None:
    for frame in frames:
        reader.feed_data(len(frame).to_bytes(4, "big") + frame)


async def test_frames_arrive_whole_until_the_stream_ends() -> None:
    for limits in (TransportLimits(), TransportLimits(download_bytes_per_second=RATE)):
        reader, lane = make(Lane.BULK, limits)
        frames = [bytes([number]) * (1 + 10_000 * number) for number in range(3)]
        feed(reader, *frames)
        reader.feed_eof()
        assert [await lane.next_frame() for _ in range(4)] == [*frames, None]


async def test_bulk_frames_are_read_at_the_rate_of_the_cap() -> None:
    reader, lane = make(Lane.BULK, TransportLimits(download_bytes_per_second=RATE))
    feed(reader, bytes(512 * KIB), bytes(512 * KIB))
    for _ in range(2):
        await lane.next_frame()
    assert now() == pytest.approx(10.24 * WIRE_SHARE, rel=0.03)


async def test_the_sender_is_not_blamed_for_the_time_of_our_own_cap() -> None:
    limits = TransportLimits(download_bytes_per_second=RATE, frame_seconds=1.0, slowest_bytes_per_second=MIB)
    reader, lane = make(Lane.BULK, limits)
    feed(reader, bytes(1024 * KIB))
    assert await lane.next_frame() == bytes(1024 * KIB)
    assert now() > 10.0


async def trickle(reader: FakeStream, chunk: bytes, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        reader.feed_data(chunk)


@pytest.mark.parametrize("cap", [None, RATE])
async def test_a_sender_of_a_byte_a_second_is_given_up_in_bounded_time(cap: float | None) -> None:
    reader, lane = make(Lane.BULK, TransportLimits(download_bytes_per_second=cap))
    reader.feed_data((1024 * KIB).to_bytes(4, "big"))
    trickling = asyncio.ensure_future(trickle(reader, b"x", 1.0))
    with pytest.raises(PeerError, match=r"did not finish a bulk frame of 1048576 bytes in 94\.0 s"):
        await lane.next_frame()
    assert now() < 30.0 + 64.0 + 11.0
    trickling.cancel()


@pytest.mark.parametrize("cap", [None, RATE])
async def test_a_sender_that_stops_at_the_last_hundredth_of_a_frame_is_given_up_in_bounded_time(
    cap: float | None,
) -> None:
    reader, lane = make(Lane.BULK, TransportLimits(download_bytes_per_second=cap))
    reader.feed_data((1000 * KIB).to_bytes(4, "big") + bytes(990 * KIB))
    with pytest.raises(PeerError, match="did not finish a bulk frame of 1024000 bytes"):
        await lane.next_frame()
    assert now() < 30.0 + 62.5 + 11.0


async def test_an_incomplete_frame_under_a_cap_is_reported_with_its_received_bytes() -> None:
    reader, lane = make(Lane.BULK, TransportLimits(download_bytes_per_second=RATE))
    reader.feed_data((100 * KIB).to_bytes(4, "big") + bytes(60 * KIB))
    reader.feed_eof()
    with pytest.raises(FrameError, match="sent 61440 of 102400 bytes of a bulk frame and disconnected"):
        await lane.next_frame()


async def test_control_frames_do_not_wait_for_the_cap_and_are_charged_to_bulk() -> None:
    limits = TransportLimits(download_bytes_per_second=RATE)
    pace = Pace(RATE)
    stream, lane = make(Lane.CONTROL, limits, pace=pace)
    feed(stream, bytes(100 * KIB))
    assert await lane.next_frame() == bytes(100 * KIB)
    assert now() == 0.0
    assert pace.debt_bytes() > 0.8 * 100 * KIB


@pytest.mark.parametrize("cap", [None, RATE])
async def test_a_flood_on_the_control_lane_is_read_no_faster_than_its_share(cap: float | None) -> None:
    limits = TransportLimits(download_bytes_per_second=cap, control_bytes_per_second=64.0 * KIB)
    share = 64.0 * KIB if cap is None else 0.25 * cap
    reader, lane = make(Lane.CONTROL, limits)
    num_frames = 40
    feed(reader, *(bytes(100 * KIB) for _ in range(num_frames)))
    for _ in range(num_frames):
        await lane.next_frame()
    assert now() == pytest.approx(num_frames * 100 * KIB / share - CONTROL_BURST_SECONDS, rel=0.02)


async def test_a_read_count_is_reported_and_is_not_a_frame() -> None:
    heard: list[int] = []
    reader, lane = make(Lane.CONTROL, TransportLimits(), was_read=heard.append)
    reader.feed_data(reading_of(5) + reading_of(1000))
    feed(reader, b"frame")
    assert await lane.next_frame() == b"frame"
    assert heard == [5, 1000]
