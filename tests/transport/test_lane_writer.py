"""The writer of one lane: order of frames, pieces under a cap, turns, and timely loss of links that are not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.rate import WIRE_SHARE
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.framing import END, LaneStream
from p2p_diloco.transport.link import KIB, Frame, Lane, SplitFrame, TransportCounters, TransportLimits
from p2p_diloco.transport.rate_limit import Pace
from p2p_diloco.transport.stream_link import LaneWriter, StreamLink
from tests.transport.stage import FakeStream

RATE = 100.0 * KIB
LIMITS = TransportLimits(frame_seconds=10.0, slowest_bytes_per_second=64.0 * KIB)


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """One link with a fake stream in each lane."""

    def __init__(self, name: str, *, pace: Pace, reads: Callable[[], float] = lambda: float("inf")) -> None:
        self.counters = TransportCounters()
        self.link = StreamLink(PeerId(sha256(name.encode())), LIMITS, self.counters)
        self.sockets = {lane: FakeStream(reads) for lane in Lane}
        for lane, socket in self.sockets.items():
            self.link.streams[lane].append(LaneStream(lane, cast(ByteStream, socket)))
        self.ended: list[tuple[float, str]] = []
        self.idle = asyncio.Event()
        self.writers = {
            lane: LaneWriter(
                self.link, lane, limits=LIMITS, pace=pace, went_idle=self.idle,
                end_stream=self._end,
            )
            for lane in Lane
        }  # fmt: skip

    def _end(self, link: StreamLink, stream: LaneStream, reason: str) -> None:
        self.ended.append((now(), reason))
        link.is_lost = True

    def post(self, frame: Frame, lane: Lane = Lane.BULK, seconds: float = 600.0) -> None:
        assert self.link.outboxes[lane].offer(frame, now() + seconds)
        self.link.wakes[lane].set()

    @asynccontextmanager
    async def writing(self) -> Any:
        tasks = [asyncio.ensure_future(writer.run()) for writer in self.writers.values()]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def until_written(self, num_bytes: int, lane: Lane = Lane.BULK) -> float:
        async with asyncio.timeout(1000):
            while len(self.sockets[lane].written) < num_bytes:
                await asyncio.sleep(0.01)
        return now()


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


@pytest.mark.parametrize("rate", [None, RATE])
async def test_frames_are_written_in_order_after_their_lengths(rate: float | None) -> None:
    bench = Bench("one", pace=Pace(rate))
    frames = [bytes([number]) * (1 + 20_000 * number) for number in range(4)]
    for frame in frames:
        bench.post(frame)
    whole = b"".join(map(framed, frames))
    async with bench.writing():
        await bench.until_written(len(whole))
        await bench.idle.wait()
    assert bytes(bench.sockets[Lane.BULK].written) == whole
    bulk = bench.counters.bulk
    assert (bulk.frames_sent, bulk.bytes_sent, bulk.bytes_waiting) == (4, len(whole), 0)
    assert bench.link.is_idle()


async def test_a_frame_cut_off_by_closing_is_never_completed() -> None:
    bench = Bench("one", pace=Pace(RATE))
    stream, socket = bench.link.streams[Lane.BULK][0], bench.sockets[Lane.BULK]
    bench.post(bytes(1024 * KIB))
    async with bench.writing():
        await bench.until_written(100_000)
    written = len(socket.written)
    assert written < 1024 * KIB
    socket.feed_eof()
    await stream.close_gently(1.0)
    assert (len(socket.written), socket.ends) == (written, ["eof", "abort"])


async def test_a_lane_closed_between_frames_sends_an_end_marker() -> None:
    bench = Bench("one", pace=Pace(RATE))
    stream, socket = bench.link.streams[Lane.BULK][0], bench.sockets[Lane.BULK]
    bench.post(bytes(100 * KIB))
    async with bench.writing():
        await bench.until_written(100 * KIB + 4)
    socket.feed_eof()
    await stream.close_gently(1.0)
    assert (bytes(socket.written[-4:]), len(socket.written)) == (END, 100 * KIB + 8)
    assert socket.ends == ["abort"]


async def test_under_a_cap_a_long_frame_is_sent_in_pieces_at_the_rate_of_the_cap() -> None:
    pace = Pace(RATE)
    bench = Bench("one", pace=pace)
    bench.post(bytes(1024 * KIB))
    async with bench.writing():
        await asyncio.sleep(5.0)
        assert bench.counters.bulk.bytes_waiting == pytest.approx(1024 * KIB - 5 * RATE / WIRE_SHARE, rel=0.05)
        took = await bench.until_written(1024 * KIB + 4)
    assert took == pytest.approx(10.24 * WIRE_SHARE, rel=0.02)
    assert max(size for _, size in bench.sockets[Lane.BULK].writes) <= pace.piece_bytes


async def test_a_control_frame_does_not_wait_and_is_charged_to_later_frames() -> None:
    bench = Bench("one", pace=Pace(RATE))
    bench.post(bytes(1024 * KIB))
    async with bench.writing():
        await asyncio.sleep(1.0)
        bench.post(bytes(200 * KIB), Lane.CONTROL)
        assert await bench.until_written(200 * KIB, Lane.CONTROL) < 1.1
        took = await bench.until_written(1024 * KIB + 4)
    assert took == pytest.approx(12.24 * WIRE_SHARE, rel=0.02)


async def test_frames_take_turns_and_an_expired_frame_is_not_written() -> None:
    pace = Pace(RATE)
    first, second = Bench("one", pace=pace), Bench("two", pace=pace)
    first.post(bytes(500 * KIB))
    async with first.writing(), second.writing():
        await asyncio.sleep(0.1)
        second.post(bytes(100 * KIB), seconds=3.0)
        second.post(bytes(10 * KIB))
        await second.until_written(10 * KIB)
    assert len(first.sockets[Lane.BULK].written) == 500 * KIB + 4, "the first frame is finished first"
    assert second.counters.bulk.frames_dropped == 1
    assert len(second.sockets[Lane.BULK].written) == 10 * KIB + 4


async def test_a_deadline_missed_because_of_the_cap_closes_no_link() -> None:
    bench = Bench("one", pace=Pace(RATE), reads=lambda: 2 * RATE)
    bench.post(bytes(1024 * KIB), seconds=2.0)
    async with bench.writing():
        await bench.until_written(1024 * KIB + 4)
    assert bench.ended == []


@pytest.mark.parametrize("rate", [None, RATE])
async def test_a_frame_in_two_parts_is_written_as_one(rate: float | None) -> None:
    bench = Bench("one", pace=Pace(rate))
    frame, vector = SplitFrame(b"head", bytes(range(256)) * 4), bytes(range(256)) * 4
    bench.post(frame)
    async with bench.writing():
        await bench.until_written(len(frame) + 4)
    assert bytes(bench.sockets[Lane.BULK].written) == len(frame).to_bytes(4, "big") + b"head" + vector
    assert bench.counters.bulk.bytes_sent == len(frame) + 4


@pytest.mark.parametrize("rate", [None, RATE])
@pytest.mark.parametrize("reads", [0.0, 1.0, 1.0 * KIB])
async def test_a_peer_that_reads_nothing_or_almost_nothing_loses_its_link_in_bounded_time(
    rate: float | None, reads: float
) -> None:
    bench = Bench("one", pace=Pace(rate), reads=lambda: reads)
    frame = bytes(1024 * KIB)
    bench.post(frame, seconds=2.0)
    async with bench.writing():
        async with asyncio.timeout(100.0):
            while not bench.ended:
                await asyncio.sleep(0.1)
    at, reason = bench.ended[0]
    assert reason.endswith("did not read a bulk frame by its deadline")
    paced = WIRE_SHARE * len(frame) / rate if rate is not None else 0.0
    assert at <= 2.0 + LIMITS.longest_seconds(len(frame)) + paced + 6.0
    assert bench.counters.bulk.bytes_waiting == 0


async def test_a_changed_cap_holds_for_the_rest_of_a_frame_and_without_a_cap_it_passes() -> None:
    pace = Pace(RATE)
    bench = Bench("one", pace=pace)
    frame = bytes(int(10 * RATE))
    bench.post(frame)
    async with bench.writing():
        assert await bench.until_written(len(frame) // 2) == pytest.approx(5 * WIRE_SHARE, rel=0.1)
        pace.set_rate(RATE / 2)
        assert await bench.until_written(3 * len(frame) // 4) == pytest.approx(10 * WIRE_SHARE, rel=0.1)
        pace.set_rate(None)
        assert await bench.until_written(len(frame)) == pytest.approx(10 * WIRE_SHARE, rel=0.1)


async def test_frames_pass_uncapped_until_a_cap_is_set() -> None:
    pace = Pace(None)
    bench = Bench("one", pace=pace)
    frame = bytes(int(RATE))
    async with bench.writing():
        bench.post(frame)
        assert await bench.until_written(len(frame)) < 0.1
        pace.set_rate(RATE)
        bench.post(frame)
        assert await bench.until_written(2 * len(frame)) == pytest.approx(WIRE_SHARE, rel=0.15)


async def test_a_peer_that_does_not_read_delays_no_other_peers_frames_under_a_cap() -> None:
    pace = Pace(RATE)
    deaf, other = Bench("deaf", pace=pace, reads=lambda: 0.0), Bench("two", pace=pace)
    deaf.post(bytes(1024 * KIB), seconds=60.0)
    async with deaf.writing(), other.writing():
        await asyncio.sleep(0.1)
        other.post(bytes(100 * KIB))
        took = await other.until_written(100 * KIB + 4)
    assert took < 6.0, "first what fits the buffers of the one that does not read"
    assert deaf.ended == []


async def test_a_writer_stopped_outside_its_turn_leaves_the_turn_to_others() -> None:
    pace = Pace(RATE)
    deaf, other = Bench("deaf", pace=pace, reads=lambda: 0.0), Bench("two", pace=pace)
    deaf.post(bytes(1024 * KIB), seconds=60.0)
    async with other.writing():
        async with deaf.writing():
            await asyncio.sleep(4.0)  # its buffers are full, and it has given up its turn
            other.post(bytes(500 * KIB))
            await asyncio.sleep(1.0)
            assert pace.turn.locked()
        await other.until_written(500 * KIB + 4)
        await other.idle.wait()
    assert not pace.turn.locked()


async def test_bytes_in_flight_are_limited_by_the_window() -> None:
    bench = Bench("one", pace=Pace(None))
    frame = bytes(100 * KIB)
    for _ in range(4):
        bench.post(frame)
    async with bench.writing():
        await asyncio.sleep(1.0)
        assert bench.counters.bulk.frames_sent == 2
        assert bench.link.outboxes[Lane.BULK].waiting_bytes == 2 * len(frame)
        bench.link.take_read_count(len(frame) + 4)
        await bench.until_written(3 * (len(frame) + 4))
        assert bench.counters.bulk.bytes_read == len(frame) + 4
        bench.link.take_read_count(2**31 - 1)  # a total that is impossible
        await bench.until_written(4 * (len(frame) + 4))
    assert bench.counters.bulk.bytes_read == 3 * (len(frame) + 4), "it cannot have read more than was sent"


async def test_a_frame_that_expires_while_waiting_for_room_is_dropped_and_the_next_one_is_sent() -> None:
    bench = Bench("one", pace=Pace(None))
    first, late, next_one = bytes(300 * KIB), bytes(10 * KIB), bytes(20 * KIB)
    bench.post(first)
    bench.post(late, seconds=2.0)
    bench.post(next_one)
    async with bench.writing():
        await asyncio.sleep(5.0)
        assert bench.counters.bulk.frames_dropped == 1
        assert bench.link.outboxes[Lane.BULK].waiting_bytes == len(next_one)
        bench.link.take_read_count(len(first) + 4)
        await bench.until_written(len(first) + len(next_one) + 8)
    assert bench.ended == []


async def test_a_peer_that_stops_reporting_reads_loses_its_link_when_it_would_give_up_itself() -> None:
    bench = Bench("one", pace=Pace(None))
    frame = bytes(300 * KIB)
    bench.post(frame, seconds=3.0)
    bench.post(frame)
    async with bench.writing(), asyncio.timeout(100.0):
        while not bench.ended:
            await asyncio.sleep(0.1)
    at, reason = bench.ended[0]
    assert reason.endswith("did not read a bulk frame by its deadline")
    assert at == pytest.approx(3.0 + LIMITS.longest_seconds(len(frame) + 4), abs=0.2)


@pytest.mark.parametrize("says", [True, False])
async def test_a_full_buffer_is_waited_for_while_the_other_end_reports_reads(says: bool) -> None:
    """What it reads is buffered in the daemons, which accept no more meanwhile."""
    bench = Bench("one", pace=Pace(None), reads=lambda: 0.0)
    bench.link.flight.window_bytes = 1e6
    bench.post(bytes(10 * KIB))
    bench.post(bytes(10 * KIB))
    bench.post(bytes(300 * KIB), seconds=2.0)
    async with bench.writing():
        for number in range(1, 3):
            await asyncio.sleep(4.0)
            if says:
                bench.link.take_read_count(number * (10 * KIB + 4))
        await asyncio.sleep(1.0)
        assert (bench.ended == []) == says
        await asyncio.sleep(11.0)
        assert len(bench.ended) == 1


@pytest.mark.parametrize(("lane", "earliest", "latest"), [(Lane.BULK, 15.0, 18.0), (Lane.CONTROL, 4.9, 5.2)])
async def test_a_peer_that_is_heard_is_waited_for_while_a_vector_stalls(
    lane: Lane, earliest: float, latest: float
) -> None:
    bench = Bench("one", pace=Pace(None), reads=lambda: 0.0)
    bench.post(bytes(300 * KIB), lane, seconds=2.0)
    async with bench.writing(), asyncio.timeout(100.0):
        while not bench.ended:
            await asyncio.sleep(0.1)
            bench.sockets[Lane.BULK].bytes_received += 4
    assert earliest <= bench.ended[0][0] <= latest


async def test_a_peer_that_reports_reads_is_waited_for() -> None:
    bench, frame = Bench("one", pace=Pace(None)), bytes(60 * KIB)
    for _ in range(6):
        bench.post(frame, seconds=3.0)
    bench.post(frame, seconds=900.0)
    async with bench.writing():
        for number in range(1, 5):
            await asyncio.sleep(0.9 * LIMITS.longest_seconds(0))
            bench.link.take_read_count(number * (len(frame) + 4))
        assert bench.ended == []
        await bench.until_written(5 * (len(frame) + 4))
    assert bench.counters.bulk.frames_dropped == 2, "later frames were dropped at their own deadline"


async def test_under_a_cap_a_frame_that_replaces_an_expired_one_needs_room_too() -> None:
    pace = Pace(RATE)
    bench, other = Bench("one", pace=pace), Bench("two", pace=pace)
    bench.post(bytes(200 * KIB))
    async with bench.writing(), other.writing():
        await bench.until_written(200 * KIB + 4)
        other.post(bytes(500 * KIB))
        await asyncio.sleep(0.5)
        bench.post(bytes(20 * KIB), seconds=1.0)
        bench.post(bytes(300 * KIB))
        await asyncio.sleep(30.0)
        assert bench.counters.bulk.frames_sent == 1, "the expired frame would have had room"
        bench.link.take_read_count(200 * KIB + 4)
        await bench.until_written(500 * KIB + 8)


async def test_bytes_in_flight_on_a_lost_stream_delay_nobody() -> None:
    bench = Bench("one", pace=Pace(None))
    frame = bytes(300 * KIB)
    bench.post(frame)
    bench.post(frame)
    async with bench.writing():
        await asyncio.sleep(1.0)
        gone = bench.link.streams[Lane.BULK][0]
        other = FakeStream()
        bench.link.streams[Lane.BULK].append(LaneStream(Lane.BULK, cast(ByteStream, other)))
        bench.link.remove(gone)
        await asyncio.sleep(1.0)
    assert bytes(other.written) == framed(frame)


async def test_a_frame_that_fails_in_the_middle_is_no_longer_waiting() -> None:
    bench = Bench("one", pace=Pace(RATE))
    bench.post(bytes(1024 * KIB))
    async with bench.writing():
        await bench.until_written(4 * KIB)
        bench.sockets[Lane.BULK].error = ConnectionResetError("gone")
        async with asyncio.timeout(600.0):
            while not bench.ended:
                await asyncio.sleep(0.1)
    assert bench.counters.bulk.bytes_waiting == 0
