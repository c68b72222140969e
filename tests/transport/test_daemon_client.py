"""Requests to p2pd, answered by a fake daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.daemon_client import DaemonClient, DaemonRefusal
from p2p_diloco.transport.hivemind_border import p2pd_messages

PEER = PeerId(sha256(b"peer"))
PEER_BYTES = bytes.fromhex("002408011220") + PEER
ADDRESS = "/ip4/203.0.113.7/tcp/31337"

Answer = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def framed(message: Any) -> bytes:
    encoded = message.SerializeToString()
    length = len(encoded)
    prefix = bytes([length]) if length < 128 else bytes([length & 0x7F | 0x80, length >> 7])
    return bytes(prefix + encoded)


async def read_request(reader: asyncio.StreamReader) -> Any:
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return p2pd_messages().Request.FromString(await reader.readexactly(length))


@asynccontextmanager
async def fake_daemon(directory: Path, answer: Answer) -> AsyncIterator[tuple[DaemonClient, list[Any]]]:
    """Yield a client of a socket on which each request is recorded, then handed to `answer`."""
    requests: list[Any] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        requests.append(await read_request(reader))
        await answer(requests[-1], reader, writer)

    path = directory / "p2pd.sock"
    server = await asyncio.start_unix_server(serve, path=str(path))
    try:
        yield DaemonClient(path), requests
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


def answering(message: Callable[[], Any] | bytes) -> Answer:
    async def answer(_: Any, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(message if isinstance(message, bytes) else framed(message()))

    return answer


def response(**fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        messages = p2pd_messages()
        kind = messages.Response.ERROR if "error" in fields else messages.Response.OK
        return messages.Response(type=kind, **{name: part() for name, part in fields.items()})

    return make


def refusal(words: str) -> Callable[[], Any]:
    return response(error=lambda: p2pd_messages().ErrorResponse(msg=words))


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 20))


def test_the_daemon_reports_its_identity(tmp_path: Path) -> None:
    identity = response(
        identify=lambda: p2pd_messages().IdentifyResponse(
            id=PEER_BYTES, addrs=[Multiaddr(ADDRESS).to_bytes(), b"\xff\xff\xff"]
        )
    )

    async def scene() -> None:
        async with fake_daemon(tmp_path, answering(identity)) as (client, _):
            assert await client.identify() == (PEER, (ADDRESS,))

    run(scene())


def test_connecting_and_disconnecting_name_the_peer(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fake_daemon(tmp_path, answering(response())) as (client, requests):
            await client.connect(PEER, [ADDRESS], 2.5)
            await client.disconnect(PEER)
        assert requests[0].connect.peer == requests[1].disconnect.peer == PEER_BYTES
        assert list(requests[0].connect.addrs) == [Multiaddr(ADDRESS).to_bytes()]
        assert requests[0].connect.timeout == 3

    run(scene())


def test_a_refusal_carries_the_daemons_text(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fake_daemon(tmp_path, answering(refusal("no such peer"))) as (client, _):
            with pytest.raises(DaemonRefusal, match="no such peer"):
                await client.connect(PEER, [ADDRESS], 1)
            with pytest.raises(DaemonRefusal, match="no such peer"):
                await client.open_stream(PEER, "/protocol", 1)
            with pytest.raises(DaemonRefusal, match="no such peer"):
                async with client.hold_daemon():
                    pass

    run(scene())


def stream_to(peer_bytes: bytes) -> Callable[[], Any]:
    return response(streamInfo=lambda: p2pd_messages().StreamInfo(peer=peer_bytes, addr=b"", proto="/protocol"))


def test_an_opened_stream_carries_bytes(tmp_path: Path) -> None:
    async def answer(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(stream_to(PEER_BYTES)()))
        writer.write(await reader.readexactly(4))

    async def scene() -> None:
        async with fake_daemon(tmp_path, answer) as (client, requests):
            stream = await client.open_stream(PEER, "/protocol", 1)
            stream.write(b"ping")
            assert await stream.readexactly(4) == b"ping"
            stream.abort()
        assert list(requests[0].streamOpen.proto) == ["/protocol"]

    run(scene())


@pytest.mark.parametrize(
    ("peer_bytes", "text"),
    [
        (PEER_BYTES[:-1] + b"x", "the stream leads to another peer"),
        (b"\x12\x20" + bytes(32), r"a peer whose key is not Ed25519 \(34 bytes of id\) is not supported"),
    ],
)
def test_a_stream_to_another_peer_is_refused(tmp_path: Path, peer_bytes: bytes, text: str) -> None:
    async def scene() -> None:
        async with fake_daemon(tmp_path, answering(stream_to(peer_bytes))) as (client, _):
            with pytest.raises(PeerError, match=text):
                await client.open_stream(PEER, "/protocol", 1)

    run(scene())


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"\x80" * 6, "has no length"),
        (b"\xff\xff\xff\x01", "is 4194303 bytes long"),
        (b"\x05ab", "closed the connection within a message"),
        (b"", "closed the connection within a message"),
    ],
)
def test_invalid_answers_of_the_daemon_are_refused(tmp_path: Path, said: bytes, text: str) -> None:
    async def answer(_: Any, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def scene() -> None:
        async with fake_daemon(tmp_path, answer) as (client, _):
            with pytest.raises(FrameError, match=text):
                await client.identify()

    run(scene())


def test_a_missing_daemon_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(DaemonRefusal, match="the libp2p daemon does not answer: No such file or directory"):
        run(DaemonClient(tmp_path / "none.sock").disconnect(PEER))


def test_a_cancelled_call_leaves_nothing_open(tmp_path: Path) -> None:
    closed = []

    async def answer(_: Any, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        closed.append(await reader.read() == b"")

    async def scene() -> None:
        async with fake_daemon(tmp_path, answer) as (client, _):
            for call in (client.identify(), client.open_stream(PEER, "/protocol", 1)):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await call
            while len(closed) < 2:
                await asyncio.sleep(0)

    run(scene())


def test_incoming_streams_are_handed_over_with_their_authenticated_peer(tmp_path: Path) -> None:
    handed: list[tuple[PeerId, str, ByteStream]] = []
    place = tmp_path / "streams.sock"

    async def call_in(first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(place))
        writer.write(first)
        writer.write_eof()
        return reader, writer

    async def scene() -> None:
        async with (
            fake_daemon(tmp_path, answering(response())) as (client, requests),
            client.accept_streams(["/one", "/two"], place, lambda *stream: handed.append(stream)),
        ):
            assert [list(request.streamHandler.proto) for request in requests] == [["/one"], ["/two"]]
            assert requests[0].streamHandler.addr == b"\x90\x03" + bytes([len(str(place))]) + str(place).encode()
            opened = p2pd_messages().StreamInfo(peer=PEER_BYTES, addr=b"", proto="/two")
            rsa = p2pd_messages().StreamInfo(peer=b"\x12\x20" + bytes(32), addr=b"", proto="/two")
            for bad in (framed(rsa), b"\x7fabc", b"", b"\x03\xff\xff\xff"):
                reader, writer = await call_in(bad)
                assert await reader.read() == b""
                writer.transport.abort()
            _, writer = await call_in(framed(opened) + b"payload")
            while not handed:
                await asyncio.sleep(0)
            peer, protocol, stream = handed[0]
            assert (peer, protocol, await stream.read(100)) == (PEER, "/two", b"payload")
            stream.abort()
            writer.transport.abort()

    run(scene())


def test_an_incoming_stream_without_announcement_is_closed_with_the_acceptor(tmp_path: Path) -> None:
    place = tmp_path / "streams.sock"

    async def scene() -> None:
        async with (
            fake_daemon(tmp_path, answering(response())) as (client, _),
            client.accept_streams(["/one"], place, lambda *stream: None),
        ):
            reader, writer = await asyncio.open_unix_connection(str(place))
            writer.write(b"\x05a")
            for _ in range(20):
                await asyncio.sleep(0)
        assert await reader.read() == b""
        writer.transport.abort()

    run(scene())
