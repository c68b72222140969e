"""Bytes written at one end of a connection are read at the other, in any pieces and in bounded memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from p2p_diloco.transport.byte_stream import AHEAD_BYTES, FIRST_BYTES, ByteStream
from p2p_diloco.transport.link import Lane
from p2p_diloco.transport.stream_link import LaneStream

Scene = Callable[[ByteStream, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scene], None]:
    """Return a function that runs a scene over a real socket: the stream, and asyncio's streams at the other end."""

    async def over_a_socket(scene: Scene) -> None:
        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_unix_server(lambda *pair: accepted.put_nowait(pair), str(tmp_path / "s"))
        _, stream = await asyncio.get_running_loop().create_unix_connection(ByteStream, str(tmp_path / "s"))
        reader, writer = await accepted.get()
        try:
            async with asyncio.timeout(30.0):
                await scene(stream, reader, writer)
        finally:
            stream.transport.abort()
            writer.transport.abort()
            server.close()

    def run(scene: Scene) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(over_a_socket(scene))

    return run


LENGTHS = [4, 1, 0, AHEAD_BYTES - 1, AHEAD_BYTES, AHEAD_BYTES + 1, 4, 100_000, 3 * FIRST_BYTES + 7, 4, 70_000, 2, 60]


@pytest.mark.parametrize("seed", range(4))
def test_reads_of_all_lengths_return_the_bytes_in_order(play: Callable[[Scene], None], seed: int) -> None:
    rng = random.Random(seed)
    lengths = rng.sample(LENGTHS, len(LENGTHS))
    content = rng.randbytes(sum(lengths))

    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say() -> None:
            at = 0
            while at < len(content):
                piece = rng.choice((1, 3, 1000, 50_000, 1_000_000))
                writer.write(content[at : at + piece])
                at += piece
                await writer.drain()
                if rng.random() < 0.2:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say())
            at = 0
            for length in lengths:
                assert await stream.readexactly(length) == content[at : at + length]
                at += length

    play(scene)


def test_a_reader_that_does_not_read_makes_the_other_end_wait(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(8 * FIRST_BYTES))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await writer.drain()
        assert len(await stream.readexactly(8 * FIRST_BYTES)) == 8 * FIRST_BYTES
        await writer.drain()

    play(scene)


@pytest.mark.parametrize("length", [10, AHEAD_BYTES + 10, 3 * FIRST_BYTES])
def test_a_stream_that_ends_early_returns_what_arrived(play: Callable[[Scene], None], length: int) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * (length - 3))
        writer.write_eof()
        with pytest.raises(asyncio.IncompleteReadError) as found:
            await stream.readexactly(length)
        assert found.value.partial == b"x" * (length - 3)
        assert await stream.read(5) == b""

    play(scene)


def test_read_returns_the_available_bytes(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        assert await stream.read(2) == b"he"
        assert await stream.read(100) == b"llo"
        stream.write(b"so long")
        stream.write_eof()
        assert await reader.read() == b"so long"
        writer.write(b"you too")
        assert await stream.readexactly(7) == b"you too", "an end that has finished writing can still read"
        writer.close()
        assert await stream.read(1) == b""

    play(scene)


def test_memory_for_a_long_read_grows_with_its_bytes(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stream.readexactly(1 << 50)  # no machine has that much
        writer.write(b"after")
        assert await stream.readexactly(5) == b"after"

    play(scene)


def test_writing_waits_for_room_and_ends_with_the_connection(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream.transport.set_write_buffer_limits(high=1000)
        assert stream.has_room()
        await stream.drain()
        stream.write(bytes(8 * FIRST_BYTES))
        assert not stream.has_room()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stream.drain()
        assert len(await reader.readexactly(8 * FIRST_BYTES)) == 8 * FIRST_BYTES
        await stream.drain()
        stream.write(bytes(8 * FIRST_BYTES))
        writer.transport.abort()
        with pytest.raises(OSError, match=r".+"):
            await stream.drain()
        assert not stream.has_room()

    play(scene)


def test_a_broken_connection_is_not_the_end_of_the_stream(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = ConnectionResetError("gone")
        stream.connection_lost(broken)
        for length in (4, AHEAD_BYTES + 1):
            with pytest.raises(ConnectionResetError, match="gone"):
                await stream.readexactly(length)
        with pytest.raises(ConnectionResetError, match="gone"):
            await stream.drain()

    play(scene)


def test_writing_to_a_lost_connection_raises_on_every_loop(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write_on() -> None:
            for _ in range(100):
                stream.write(b"on and on")
                await stream.drain()

        stream.transport.abort()
        assert not stream.has_room(), "no room, so that writers wait"
        with pytest.raises(ConnectionResetError, match="the connection is lost"):
            await write_on()
        with pytest.raises(ConnectionResetError, match="the connection is lost"):
            stream.write(b"x")
        with pytest.raises(ConnectionResetError, match="the connection is lost"):
            stream.write_eof()

    play(scene)


def test_a_stream_lost_before_its_link_is_made_can_be_closed_as_usual(play: Callable[[Scene], None]) -> None:
    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream.transport.abort()
        with pytest.raises(asyncio.IncompleteReadError):
            await stream.readexactly(1)
        await LaneStream(Lane.BULK, stream).close_gently(1.0)

    play(scene)


@pytest.mark.parametrize("seed", range(3))
def test_a_short_read_that_is_cancelled_loses_nothing(play: Callable[[Scene], None], seed: int) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(60_000)

    async def scene(stream: ByteStream, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say() -> None:
            at = 0
            while at < len(content):
                piece = rng.choice((1, 700, 9000))
                writer.write(content[at : at + piece])
                at += piece
                await asyncio.sleep(0)
            writer.write_eof()

        at = 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say())
            while at < len(content):
                read = asyncio.ensure_future(stream.readexactly(min(rng.choice((1, 5000, 16000)), len(content) - at)))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if not read.done() and rng.random() < 0.5:
                    read.cancel()
                    await asyncio.wait({read})
                    continue
                found = await read
                assert found == content[at : at + len(found)]
                at += len(found)
        assert await stream.read(1) == b""

    play(scene)
