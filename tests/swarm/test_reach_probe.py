"""A fresh dial checks the identity: a real daemon proves it, and everything else is rejected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from p2p_diloco.errors import DialFailure, NotReached, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.p2pd import Daemon, DaemonSettings
from p2p_diloco.transport.reach_probe import is_own_host, probe_identity

SOMEBODY = PeerId(bytes(32))
Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def probe(peer: PeerId, port: int, seconds: float = 5.0) -> None:
    await probe_identity(peer, "127.0.0.1", port, asyncio.get_running_loop().time() + seconds)


async def probe_server(answering: Answering, seconds: float = 5.0) -> None:
    server = await asyncio.start_server(answering, "127.0.0.1", 0)
    async with server:
        try:
            await probe(SOMEBODY, server.sockets[0].getsockname()[1], seconds)
        finally:
            await asyncio.sleep(0.05)  # lets the other end close


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_a_daemon_is_distinguished_from_another_one_at_the_same_port(tmp_path: Path) -> None:
    async def scene() -> None:
        key, port = load_or_create_identity(tmp_path / "key"), free_port()
        settings = DaemonSettings(identity_path=tmp_path / "key", host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
        async with Daemon(settings):
            await probe(key.peer, port)
            with pytest.raises(PeerError, match=f"^127.0.0.1:{port} is another peer .{short_peer_id(key.peer)}.$"):
                await probe(SOMEBODY, port)
        with pytest.raises(PeerError, match=f"^127.0.0.1:{port} refused$"):
            await probe(key.peer, port)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00",
        b"\x13/multistream/1.0.0\n\x03na\n",
        b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x10" + bytes(16),
        b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff" + bytes(64),
        b"\x13/multistream/1.0.0\n\x07/noise\n\x01\x00" + bytes(range(256)),
        b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x60" + bytes(96),
        b"",
    ],
)
def test_an_answer_that_does_not_prove_an_identity_is_not_a_peer(said: bytes) -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(said)
        await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()

    with pytest.raises(PeerError, match=r"answers, but is not a libp2p peer$"):
        asyncio.run(probe_server(answering))


def test_a_server_that_accepts_and_sends_nothing_is_silent() -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    with pytest.raises(NotReached, match=r"accepts connections, but does not answer$") as caught:
        asyncio.run(probe_server(answering, seconds=0.3))
    assert caught.value.failure is DialFailure.SILENT


@pytest.mark.parametrize(
    ("raised", "text", "kind"),
    [
        (socket.gaierror(-2, "Name or service not known"), "b.example:9 does not resolve", DialFailure.NO_NAME),
        (ConnectionRefusedError(111, "Connection refused"), "b.example:9 refused", DialFailure.REFUSED),
        (OSError("Multiple exceptions: [Errno 111] Connection refused, …"), "b.example:9 refused", DialFailure.REFUSED),
        (OSError(113, "No route to host"), "b.example:9 has no route from here", DialFailure.NO_ROUTE),
        (TimeoutError(), "b.example:9 timed out", DialFailure.TIMED_OUT),
    ],
)
def test_each_failure_to_connect_has_its_name(
    raised: OSError, text: str, kind: DialFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_connection(*_: object, **__: object) -> None:
        raise raised

    async def scene() -> None:
        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        await probe_identity(SOMEBODY, "b.example", 9, asyncio.get_running_loop().time() + 5.0)

    with pytest.raises(NotReached, match=f"^{text}") as caught:
        asyncio.run(scene())
    assert caught.value.failure is kind


def test_this_machines_addresses_are_distinguished_from_others() -> None:
    assert is_own_host("127.0.0.1")
    assert not is_own_host("45.10.0.2")
    assert not is_own_host("2a01:4f8::1")
