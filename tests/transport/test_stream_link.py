"""A link as a bundle of streams, over fake streams."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.framing import END, READ_MODULUS, WRITE_BUFFER_BYTES, reading_of
from p2p_diloco.transport.link import Lane, TransportCounters, TransportLimits
from p2p_diloco.transport.stream_link import SAY_AGAIN_SECONDS, LaneStream, StreamLink
from simulator.virtual_time import run_virtual
from tests.transport.stage import FedReader


class FakeWriter:
    """A writer that records how it was closed."""

    def __init__(self, error: OSError | None = None) -> None:
        self.transport = self
        self.acts: list[str] = []
        self.written = b""
        self.buffered = 0
        self._error = error

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, chunk: bytes) -> None:
        if self._error is not None:
            raise self._error
        self.written += chunk

    def abort(self) -> None:
        self.acts.append("abort")


def make_stream(writer: FakeWriter, lane: Lane = Lane.BULK) -> LaneStream:
    return LaneStream(lane, (FedReader(), cast(Any, writer)))


def make_link() -> StreamLink:
    return StreamLink(PeerId(bytes(32)), TransportLimits(), TransportCounters())


def test_closing_gently_waits_for_the_other_end() -> None:
    async def main() -> float:
        writer = FakeWriter()
        stream = make_stream(writer)
        asyncio.get_running_loop().call_later(0.3, stream.reader.feed_data, b"last words")
        asyncio.get_running_loop().call_later(0.5, stream.reader.feed_eof)
        await stream.close_gently(1.0)
        assert (writer.written, writer.acts) == (END, ["abort"])
        return asyncio.get_running_loop().time()

    assert 0.4 < run_virtual(main()) < 0.6


def test_closing_gently_waits_for_the_reader_but_not_forever() -> None:
    async def main() -> float:
        writer = FakeWriter()
        stream = make_stream(writer)
        stream.task = asyncio.create_task(asyncio.sleep(100))
        await stream.close_gently(1.0)
        assert (writer.written, writer.acts) == (b"", ["abort"])
        return asyncio.get_running_loop().time()

    assert 0.9 < run_virtual(main()) < 1.1


def test_closing_gently_closes_a_broken_stream_at_once() -> None:
    async def main() -> None:
        writer = FakeWriter(BrokenPipeError())
        await make_stream(writer).close_gently(1.0)
        assert writer.acts == ["abort"]

    run_virtual(main())


def test_taking_a_link_down_stops_its_work_but_not_the_caller() -> None:
    async def main() -> None:
        link = make_link()
        link.is_up = True
        stream = make_stream(FakeWriter())
        link.streams[Lane.BULK].append(stream)
        stream.task = asyncio.create_task(asyncio.sleep(100))
        own = asyncio.current_task()
        assert own is not None
        link.writers = [own, asyncio.create_task(asyncio.sleep(100))]
        link.outboxes[Lane.BULK].offer(b"frame", 1.0)
        assert not link.is_idle()
        assert link.take_down() == [stream]
        await asyncio.sleep(0.01)
        assert stream.task.cancelled()
        assert link.writers[1].cancelled()
        assert (link.is_up, link.is_lost, link.all_streams(), link.is_idle()) == (False, True, [], True)

    run_virtual(main())


def test_a_link_that_writes_is_not_idle() -> None:
    async def main() -> None:
        link = make_link()
        link.writing.add(Lane.CONTROL)
        assert not link.is_idle()

    run_virtual(main())


def test_a_link_runs_out_stream_by_stream() -> None:
    async def main() -> None:
        link = make_link()
        for lane in Lane:
            link.streams[lane].append(make_stream(FakeWriter(), lane))
        assert (link.is_running_out(), link.has_run_out()) == (False, False)
        link.streams[Lane.CONTROL][0].has_run_out = True
        assert (link.is_running_out(), link.has_run_out()) == (True, False)
        link.streams[Lane.BULK][0].has_run_out = True
        assert (link.is_running_out(), link.has_run_out()) == (True, True)

    run_virtual(main())


@pytest.mark.parametrize(
    ("crosses_until", "now", "expected"),
    [(-math.inf, 0.0, True), (20.0, 20.0, False), (20.0, 20.1, True)],
    ids=["dialled by the other end", "dialled here just now", "dialled here long ago"],
)
def test_a_stream_from_the_other_end_outdates_a_link_unless_the_dials_may_have_crossed(
    crosses_until: float, now: float, expected: bool
) -> None:
    async def main() -> None:
        link = make_link()
        streams = FedReader(), cast(Any, FakeWriter())
        link.add(LaneStream(Lane.BULK, streams, crosses_until=crosses_until))
        assert link.is_outdated(Lane.BULK, now) is expected
        assert not link.is_outdated(Lane.CONTROL, now)

    run_virtual(main())


def test_the_read_count_is_sent_on_the_control_lane_and_repeated_once_the_other_end_reads() -> None:
    async def main() -> None:
        link, writer = make_link(), FakeWriter()
        link.say_read(7)
        link.add(make_stream(writer, Lane.CONTROL))
        link.say_read(5)
        assert writer.written == reading_of(12)
        writer.buffered = WRITE_BUFFER_BYTES + 1
        for _ in range(1000):
            link.say_read(3)
        await asyncio.sleep(10.0)
        assert writer.written == reading_of(12), "reports do not accumulate"
        writer.buffered = 0
        await asyncio.sleep(2 * SAY_AGAIN_SECONDS)
        assert writer.written == reading_of(12) + reading_of(3012)
        link.say_read(READ_MODULUS - 3000)
        assert writer.written.endswith(reading_of(12)), "the count wraps around"

    run_virtual(main())


def test_the_read_count_is_repeated_on_another_stream() -> None:
    async def main() -> None:
        link, first, second = make_link(), FakeWriter(), FakeWriter()
        old, new = make_stream(first, Lane.CONTROL), make_stream(second, Lane.CONTROL)
        link.add(old)
        link.is_up = True
        link.say_read(7)
        link.add(new)
        assert second.written == reading_of(7), "the other end may have missed earlier reports"
        link.say_read(5)
        assert (first.written, second.written) == (reading_of(7), reading_of(7) + reading_of(12))
        link.remove(new)
        assert first.written == reading_of(7) + reading_of(12), "reports on the other stream may be lost with it"

    run_virtual(main())


def test_reads_are_counted_once_even_if_reports_were_lost() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_removing_a_bulk_stream_that_is_only_read_keeps_bytes_in_flight() -> None:
    async def main() -> None:
        link = make_link()
        written, other = make_stream(FakeWriter()), make_stream(FakeWriter())
        link.add(written)
        link.add(other)
        link.flight.send(100, 0.0, 60.0)
        link.remove(other)
        assert link.flight.bytes_under_way == 100
        link.remove(written)
        assert link.flight.bytes_under_way == 0

    run_virtual(main())


def test_reporting_reads_on_a_lost_connection_does_nothing() -> None:
    async def main() -> None:
        link = make_link()
        link.streams[Lane.CONTROL].append(make_stream(FakeWriter(BrokenPipeError()), Lane.CONTROL))
        link.say_read(5)

    run_virtual(main())
