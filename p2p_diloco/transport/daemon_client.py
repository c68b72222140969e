"""Requests to p2pd over its control socket: identify, connect, open streams, accept streams.

hivemind's client leaves its socket open when a call fails or is cancelled, and its calls cannot time out; this one
always closes what it opened. Messages are hivemind's protobufs, which are not used outside this module.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.hivemind_border import p2pd_messages
from p2p_diloco.transport.protobuf import encode_varint

_LONGEST_MESSAGE_BYTES = 256 * 1024
_ED25519_ID_PREFIX = bytes.fromhex("002408011220")
_UNIX_PROTOCOL = bytes.fromhex("9003")

StreamHandler = Callable[[PeerId, str, ByteStream], None]


class DaemonRefusal(PeerError):
    """p2pd refused a request; the text is its own."""


class DaemonClient:
    """Client of the p2pd that listens on `control_path`. Calls have no timeout: use `asyncio.timeout`."""

    def __init__(self, control_path: Path) -> None:
        self._control_path = control_path

    @asynccontextmanager
    async def hold_daemon(self) -> AsyncIterator[None]:
        """Keep the daemon alive inside the block: p2pd exits when the last such connection closes."""
        messages = p2pd_messages()
        async with self._answered(messages.Request(type=messages.Request.PERSISTENT_CONN_UPGRADE)):
            yield

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return the daemon's peer id and its presumed multiaddrs, without `/p2p/…`."""
        messages = p2pd_messages()
        response = await self._request(messages.Request(type=messages.Request.IDENTIFY))
        addresses = (_parse_address(raw) for raw in response.identify.addrs)
        return _peer_of(response.identify.id), tuple(address for address in addresses if address is not None)

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_seconds: float) -> None:
        """Connect to `peer` at any of `addresses` (without `/p2p/…`); if empty, at any address known to the daemon."""
        messages = p2pd_messages()
        connect = messages.ConnectRequest(
            peer=_ED25519_ID_PREFIX + peer,
            addrs=[Multiaddr(address).to_bytes() for address in addresses],
            timeout=max(1, math.ceil(timeout_seconds)),
        )
        await self._request(messages.Request(type=messages.Request.CONNECT, connect=connect))

    async def connections(self) -> list[tuple[PeerId, str]]:
        """Return the open connections: the peer, and its address as seen here."""
        messages = p2pd_messages()
        response = await self._request(messages.Request(type=messages.Request.LIST_PEERS))
        found: list[tuple[PeerId, str]] = []
        for raw in response.peers:
            if _is_ed25519(raw.id):
                addresses = (_parse_address(address) for address in raw.addrs)
                found += [(_peer_of(raw.id), address) for address in addresses if address is not None]
        return found

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection to `peer` and all its streams."""
        messages = p2pd_messages()
        disconnect = messages.DisconnectRequest(peer=_ED25519_ID_PREFIX + peer)
        await self._request(messages.Request(type=messages.Request.DISCONNECT, disconnect=disconnect))

    async def open_stream(self, peer: PeerId, protocol: str, timeout_seconds: float) -> ByteStream:
        """Open a stream of `protocol` to `peer`, which should be connected."""
        messages = p2pd_messages()
        wanted = messages.StreamOpenRequest(
            peer=_ED25519_ID_PREFIX + peer, proto=[protocol], timeout=max(1, math.ceil(timeout_seconds))
        )
        stream = await self._open()
        try:
            response = await _request(stream, messages.Request(type=messages.Request.STREAM_OPEN, streamOpen=wanted))
            if _peer_of(response.streamInfo.peer) != peer:
                raise DaemonRefusal("the stream leads to another peer")
        except BaseException:
            stream.abort()
            raise
        return stream

    @asynccontextmanager
    async def accept_streams(
        self, protocols: Sequence[str], socket_path: Path, handler: StreamHandler
    ) -> AsyncIterator[None]:
        """Pass incoming streams of `protocols` to `handler` inside the block."""

        async def accept(stream: ByteStream) -> None:
            try:
                opened = p2pd_messages().StreamInfo()
                async with asyncio.timeout(10.0):
                    await _read_message(stream, opened)
                peer, protocol = _peer_of(opened.peer), opened.proto
            except (TimeoutError, PeerError, OSError, EOFError):
                stream.abort()
                return
            handler(peer, protocol, stream)

        def connected(stream: ByteStream) -> None:
            task = loop.create_task(accept(stream))
            accepting.add(task)
            task.add_done_callback(accepting.discard)
            task.add_done_callback(lambda ended: stream.abort() if ended.cancelled() else None)

        loop, accepting = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        server = await loop.create_unix_server(lambda: ByteStream(connected), str(socket_path))
        try:
            for protocol in protocols:
                await self._register(protocol, socket_path)
            yield
        finally:
            server.close()  # do not wait: since Python 3.12 that would wait for every stream
            for task in accepting:
                task.cancel()

    async def _register(self, protocol: str, socket_path: Path) -> None:
        messages = p2pd_messages()
        path = str(socket_path).encode()
        wanted = messages.StreamHandlerRequest(
            addr=_UNIX_PROTOCOL + encode_varint(len(path)) + path, proto=[protocol], balanced=False
        )
        await self._request(messages.Request(type=messages.Request.STREAM_HANDLER, streamHandler=wanted))

    async def _request(self, request: Any) -> Any:
        async with self._answered(request) as response:
            return response

    @asynccontextmanager
    async def _answered(self, request: Any) -> AsyncIterator[Any]:
        """Yield the answer to a request; its connection is open inside the block."""
        stream = await self._open()
        try:
            yield await _request(stream, request)
        finally:
            stream.abort()

    async def _open(self) -> ByteStream:
        try:
            loop = asyncio.get_running_loop()
            return (await loop.create_unix_connection(ByteStream, str(self._control_path)))[1]
        except OSError as error:
            raise DaemonRefusal(f"the libp2p daemon does not answer: {error.strerror or error}") from None


async def _request(stream: ByteStream, request: Any) -> Any:
    encoded = request.SerializeToString()
    stream.write(encode_varint(len(encoded)) + encoded)
    await stream.drain()
    response = p2pd_messages().Response()
    await _read_message(stream, response)
    if response.type == response.ERROR:
        raise DaemonRefusal(str(response.error.msg))
    return response


def _is_ed25519(raw: bytes) -> bool:
    return len(raw) == len(_ED25519_ID_PREFIX) + 32 and raw.startswith(_ED25519_ID_PREFIX)


def _peer_of(raw: bytes) -> PeerId:
    if not _is_ed25519(raw):
        raise PeerError(f"a peer whose key is not Ed25519 ({len(raw)} bytes of id) is not supported")
    return PeerId(bytes(raw[len(_ED25519_ID_PREFIX) :]))


def _parse_address(raw: bytes) -> str | None:
    try:
        return str(Multiaddr(raw))
    except (MultiaddrError, ValueError):  # a protocol newer than the package
        return None


async def _read_message(stream: ByteStream, message: Any) -> None:
    """Read a length-prefixed `message`.

    Raises:
        FrameError: it is longer than any message of p2pd, ends early, or is malformed.
    """
    length = shift = 0
    try:
        while True:
            byte = (await stream.readexactly(1))[0]
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
            if shift > 28:
                raise FrameError("a message of the libp2p daemon has no length")
        if length > _LONGEST_MESSAGE_BYTES:
            raise FrameError(f"a message of the libp2p daemon is {length} bytes long")
        encoded = await stream.readexactly(length)
    except asyncio.IncompleteReadError:
        raise FrameError("the libp2p daemon closed the connection within a message") from None
    try:
        message.ParseFromString(bytes(encoded))
    except Exception:  # protobuf's own errors, which have no common base class
        raise FrameError(f"{length} bytes of the libp2p daemon are not a message") from None
