"""A link as a bundle of streams, over fake streams."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.byte_stream import WRITE_BUFFER_BYTES, ByteStream
from p2p_diloco.transport.framing import END, READ_MODULUS, LaneStream, reading_of
from p2p_diloco.transport.link import Lane, TransportCounters, TransportLimits
from p2p_diloco.transport.stream_link import REPEAT_SECONDS, StreamLink
from simulator.virtual_time import run_virtual
from tests.transport.stage import FakeStream


def make_stream(connection: FakeStream, lane: Lane = Lane.BULK, crosses_until: float = -math.inf) -> LaneStream:
    return LaneStream(lane, cast(ByteStream, connection), crosses_until=crosses_until)


def make_link() -> StreamLink:
    return StreamLink(PeerId(bytes(32)), TransportLimits(), TransportCounters())


def test_closing_gently_waits_for_the_other_end() -> None:
    async def main() -> float:
        connection = FakeStream()
        stream = make_stream(connection)
        asyncio.get_running_loop().call_later(0.3, connection.feed_data, b"last words")
        asyncio.get_running_loop().call_later(0.5, connection.feed_eof)
        await stream.close_gently(1.0)
        assert (connection.written, connection.ends) == (END, ["abort"])
        return asyncio.get_running_loop().time()

    assert 0.4 < run_virtual(main()) < 0.6


def test_closing_gently_waits_for_the_reader_but_not_forever() -> None:
    async def main() -> float:
        connection = FakeStream()
        stream = make_stream(connection)
        stream.read_in(asyncio.create_task(asyncio.sleep(100)))
        await stream.close_gently(1.0)
        assert (connection.written, connection.ends) == (b"", ["abort"])
        return asyncio.get_running_loop().time()

    assert 0.9 < run_virtual(main()) < 1.1


async def test_closing_gently_closes_a_broken_stream_at_once() -> None:
    connection = FakeStream(error=BrokenPipeError())
    await make_stream(connection).close_gently(1.0)
    assert connection.ends == ["abort"]


async def test_taking_a_link_down_stops_its_work_but_not_the_caller() -> None:
    link = make_link()
    stream = make_stream(FakeStream())
    link.add(stream)
    reading, writing = asyncio.create_task(asyncio.sleep(100)), asyncio.create_task(asyncio.sleep(100))
    stream.read_in(reading)
    own = asyncio.current_task()
    assert own is not None
    link.start([own, writing])
    link.outboxes[Lane.BULK].offer(b"frame", 1.0)
    assert not link.is_idle()
    assert link.take_down() == [stream]
    await asyncio.sleep(0.01)
    assert reading.cancelled()
    assert writing.cancelled()
    assert (link.is_up, link.is_lost, link.all_streams(), link.is_idle()) == (False, True, [], True)


async def test_a_link_that_writes_is_not_idle() -> None:
    link = make_link()
    link.writing.add(Lane.CONTROL)
    assert not link.is_idle()


async def test_a_link_runs_out_stream_by_stream() -> None:
    link = make_link()
    for lane in Lane:
        link.streams[lane].append(make_stream(FakeStream(), lane))
    assert (link.is_running_out(), link.has_run_out()) == (False, False)
    link.streams[Lane.CONTROL][0].run_out()
    assert (link.is_running_out(), link.has_run_out()) == (True, False)
    link.streams[Lane.BULK][0].run_out()
    assert (link.is_running_out(), link.has_run_out()) == (True, True)


@pytest.mark.parametrize(
    ("crosses_until", "now", "expected"),
    [(-math.inf, 0.0, True), (20.0, 20.0, False), (20.0, 20.1, True)],
    ids=["dialled by the other end", "dialled here just now", "dialled here long ago"],
)
async def test_a_stream_from_the_other_end_outdates_a_link_unless_the_dials_may_have_crossed(
    crosses_until: float, now: float, expected: bool
) -> None:
    link = make_link()
    link.add(make_stream(FakeStream(), crosses_until=crosses_until))
    assert link.is_outdated(Lane.BULK, now) is expected
    assert not link.is_outdated(Lane.CONTROL, now)


async def test_the_read_count_is_sent_on_the_control_lane_and_repeated_once_the_other_end_reads() -> None:
    link, connection = make_link(), FakeStream()
    link.acknowledge(7)
    link.add(make_stream(connection, Lane.CONTROL))
    link.acknowledge(5)
    assert connection.written == reading_of(12)
    connection.unsent = WRITE_BUFFER_BYTES + 1
    for _ in range(1000):
        link.acknowledge(3)
    await asyncio.sleep(10.0)
    assert connection.written == reading_of(12), "reports do not accumulate"
    connection.unsent = 0
    await asyncio.sleep(2 * REPEAT_SECONDS)
    assert connection.written == reading_of(12) + reading_of(3012)
    link.acknowledge(READ_MODULUS - 3000)
    assert connection.written.endswith(reading_of(12)), "the count wraps around"


async def test_the_read_count_is_repeated_on_another_stream() -> None:
    link, first, second = make_link(), FakeStream(), FakeStream()
    old, new = make_stream(first, Lane.CONTROL), make_stream(second, Lane.CONTROL)
    link.add(old)
    link.start([])
    link.acknowledge(7)
    link.add(new)
    assert second.written == reading_of(7), "the other end may have missed earlier reports"
    link.acknowledge(5)
    assert (first.written, second.written) == (reading_of(7), reading_of(7) + reading_of(12))
    link.remove(new)
    assert first.written == reading_of(7) + reading_of(12), "reports on the other stream may be lost with it"


async def test_reads_are_counted_once_even_if_reports_were_lost() -> None:
    link = make_link()
    for num_bytes in (100, 200, 300):
        link.flight.send(num_bytes, 0.0, 60.0)
    link.take_read_count(100)
    assert link.flight.bytes_under_way == 500
    link.take_read_count(100)
    assert link.flight.bytes_under_way == 500
    link.take_read_count(600)
    assert link.flight.bytes_under_way == 0
    link.flight.send(50, 0.0, 60.0)
    link.take_read_count(0)
    assert link.flight.bytes_under_way == 0, "the other end restarted its count, so what it has read is unknown"
    link.flight.send(50, 0.0, 60.0)
    link.take_read_count(20)
    assert link.flight.bytes_under_way == 30


async def test_removing_a_bulk_stream_that_is_only_read_keeps_bytes_in_flight() -> None:
    link = make_link()
    written, other = make_stream(FakeStream()), make_stream(FakeStream())
    link.add(written)
    link.add(other)
    link.flight.send(100, 0.0, 60.0)
    link.remove(other)
    assert link.flight.bytes_under_way == 100
    link.remove(written)
    assert link.flight.bytes_under_way == 0


async def test_reporting_reads_on_a_lost_connection_does_nothing() -> None:
    link = make_link()
    link.streams[Lane.CONTROL].append(make_stream(FakeStream(error=BrokenPipeError()), Lane.CONTROL))
    link.acknowledge(5)
