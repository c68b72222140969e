"""Frames on a stream: bounded reads and bounded writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.framing import END, NO_SIGNS, READ_MODULUS, greet, read_frame, reading_of, write_frame
from p2p_diloco.transport.link import Frame, Lane, SplitFrame, TransportLimits
from simulator.virtual_time import run_virtual
from tests.transport.stage import FakeStream

PEER = PeerId(sha256(b"peer"))
PATIENT = TransportLimits()
LIMITS = TransportLimits(bulk_frame_bytes=100, frame_seconds=3.0, slowest_bytes_per_second=10.0)


class Writing(FakeStream):
    """A stream whose `drain` is the test's."""

    def __init__(self, drain: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._drain = drain
        self.unsent = 1

    async def drain(self) -> None:
        waiting = self._drain()
        if isinstance(waiting, asyncio.Future):
            await waiting


def stream(*chunks: bytes, ends: bool = True, error: Exception | None = None) -> Any:
    reader = FakeStream()
    for chunk in chunks:
        reader.feed_data(chunk)
    if error is not None:
        reader.set_exception(error)
    elif ends:
        reader.feed_eof()
    return reader


def read(*chunks: bytes, ends: bool = True, error: Exception | None = None) -> bytes | None:
    async def main() -> bytes | None:
        return await read_frame(stream(*chunks, ends=ends, error=error), sender=PEER, lane=Lane.BULK, limits=LIMITS)

    return run_virtual(main())


def write(frame: Frame, drain: Callable[[], object] = lambda: None) -> bytes:
    async def main() -> bytes:
        writer = Writing(drain)
        await write_frame(
            cast(ByteStream, writer), frame, receiver=PEER, lane=Lane.BULK,
            deadline=asyncio.get_running_loop().time() + 5, limits=LIMITS,
        )  # fmt: skip
        return bytes(writer.written)

    return run_virtual(main())


def test_a_frame_is_read_as_it_was_written() -> None:
    assert read(write(b"payload")) == b"payload"
    long = bytes(range(256)) * 300
    assert write(long) == len(long).to_bytes(4, "big") + long
    assert write(SplitFrame(b"head", memoryview(long))) == (4 + len(long)).to_bytes(4, "big") + b"head" + long


def test_an_end_between_frames_is_not_an_error() -> None:
    assert read() is None


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(FrameError, match=r"12D3\.\..* announced a bulk frame of 4294967295 bytes where 1 to 100 are"):
        read(b"\xff\xff\xff\xff", ends=False)


def test_on_the_control_lane_a_length_with_its_highest_bit_set_is_a_read_count() -> None:
    async def main(said: bytes) -> object:
        reader = stream(said + b"\x00\x00\x00\x02ok", ends=False)
        first = await read_frame(reader, sender=PEER, lane=Lane.CONTROL, limits=LIMITS)
        assert await read_frame(reader, sender=PEER, lane=Lane.CONTROL, limits=LIMITS) == b"ok"
        return first

    for num_bytes in (0, 1, 70_000, READ_MODULUS - 1):
        assert run_virtual(main(reading_of(num_bytes))) == num_bytes


def test_an_empty_frame_ends_the_stream() -> None:
    assert read(END, ends=False) is None


def test_a_cut_off_length_is_refused() -> None:
    with pytest.raises(FrameError, match="closed the connection within the length of a bulk frame"):
        read(b"\x00\x00")


def test_a_cut_off_frame_is_refused() -> None:
    with pytest.raises(FrameError, match="sent 3 of 8 bytes of a bulk frame and disconnected"):
        read(b"\x00\x00\x00\x08abc")


def test_a_frame_that_arrives_too_slowly_is_given_up() -> None:
    with pytest.raises(PeerError, match=r"did not finish a bulk frame of 50 bytes in 8\.0 s"):
        read(b"\x00\x00\x00\x32abc", ends=False)


async def read_until_reset(start: bytes) -> object:
    reader = stream(start, ends=False)
    reading = asyncio.create_task(read_frame(reader, sender=PEER, lane=Lane.BULK, limits=LIMITS))
    await asyncio.sleep(1)
    reader.set_exception(ConnectionResetError(104, "Connection reset by peer"))
    return await reading


def test_a_connection_that_breaks_within_a_frame_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match=r"the connection to .* broke: Connection reset by peer"):
        run_virtual(read_until_reset(b"\x00\x00\x00\x08"))


def test_a_reset_between_frames_is_the_end_of_the_stream() -> None:
    """A daemon resets a stream whose other end is closed if it has not forwarded all that was written to it."""
    assert run_virtual(read_until_reset(b"")) is None


def test_an_unread_write_ends_at_its_deadline() -> None:
    with pytest.raises(PeerError, match="did not read a bulk frame by its deadline"):
        write(b"payload", drain=lambda: asyncio.get_running_loop().create_future())


def test_a_slowly_read_write_continues_and_ends_once_reading_stops() -> None:
    class SlowWriter(Writing):
        async def drain(self) -> None:
            while self.unsent > 0:
                await asyncio.sleep(2.0)
                self.unsent -= 50 if asyncio.get_running_loop().time() < stops_at else 0

    async def write_to() -> float:
        writer = SlowWriter()
        writer.unsent = 300
        await write_frame(
            cast(ByteStream, writer), b"payload", receiver=PEER, lane=Lane.BULK, deadline=3.0, limits=PATIENT
        )
        return asyncio.get_running_loop().time()

    stops_at = 1000.0
    assert run_virtual(write_to()) > 10.0
    stops_at = 7.0
    with pytest.raises(PeerError, match="did not read a bulk frame"):
        run_virtual(write_to())


@pytest.mark.parametrize(("silent_from", "ends_at"), [(0.0, 5.0), (7.0, 15.0), (1e9, 20.0)])
def test_an_unread_write_waits_a_while_if_the_other_end_sends(silent_from: float, ends_at: float) -> None:
    """A packet that is lost again and again holds up a connection for seconds; a new one starts slowly."""

    async def write_to() -> float:
        loop = asyncio.get_running_loop()
        writer = Writing(drain=loop.create_future)
        with pytest.raises(PeerError, match="did not read a bulk frame"):
            await write_frame(
                cast(ByteStream, writer), b"payload", receiver=PEER, lane=Lane.BULK, deadline=3.0,
                limits=PATIENT, signs=NO_SIGNS._replace(bytes_received=lambda: int(min(loop.time(), silent_from))),
            )  # fmt: skip
        return loop.time()

    assert run_virtual(write_to()) == pytest.approx(ends_at)


def test_a_write_to_a_broken_connection_is_a_peer_error() -> None:
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(PeerError, match=r"the connection to .* broke: Broken pipe"):
        write(b"payload", drain=fail)


def test_greetings_are_exchanged() -> None:
    async def main() -> bytes:
        connection = stream(bytes(4) + b"next", ends=False)
        await greet(connection)
        return bytes(connection.written)

    assert run_virtual(main()) == bytes(4)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(b"HTTP", "did not begin with a greeting"), (b"\x00", "closed before the greeting"), (b"", "before the greeting")],
)
def test_a_stream_without_a_greeting_is_refused(answer: bytes, text: str) -> None:
    async def main() -> None:
        await greet(stream(answer))

    with pytest.raises(FrameError, match=text):
        run_virtual(main())
