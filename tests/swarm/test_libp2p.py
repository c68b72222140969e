"""Real daemons beyond the contract: strangers' bytes on real streams, the daemon's death, several daemons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from p2p_diloco.errors import NetworkError, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport import libp2p
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.daemon_client import DaemonClient, DaemonRefusal
from p2p_diloco.transport.framing import END
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import Lane, TransportLimits
from p2p_diloco.transport.p2pd import Daemon, DaemonSettings
from p2p_diloco.transport.strangers import BORNE_AT_ONCE, MOST_OF_ONE
from tests.transport.stage import RUN, Recorder, in_seconds, link

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
GREETING = bytes(4)


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def act() -> None:
        async with asyncio.timeout(30):
            await scene

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act())


def make(directory: Path, name: str, limits: TransportLimits | None = None) -> tuple[Libp2pTransport, Recorder]:
    path = directory / f"{name}.key"
    key = load_or_create_identity(path)
    transport = Libp2pTransport(peer=key.peer, run=RUN, identity_path=path, host_maddrs=[LOOPBACK], limits=limits)
    recorder = Recorder()
    transport.serve(recorder)
    return transport, recorder


@asynccontextmanager
async def stranger(directory: Path) -> AsyncIterator[tuple[PeerId, DaemonClient]]:
    """Yield a daemon that is controlled directly, to send what no transport would."""
    path = directory / "stranger.key"
    key = load_or_create_identity(path)
    async with Daemon(DaemonSettings(identity_path=path, host_maddrs=())) as daemon:
        client = DaemonClient(daemon.control_path)
        async with client.hold_daemon():
            yield key.peer, client


async def open_lane(client: DaemonClient, target: Libp2pTransport, lane: Lane) -> ByteStream:
    bare = tuple(address.rpartition("/p2p/")[0] for address in target.listen_addresses())
    await client.connect(target.peer, bare, 5)
    return await client.open_stream(target.peer, f"/p2p-diloco/2/{RUN.hex()[:16]}/{lane.value}", 5)


async def open_link(client: DaemonClient, target: Libp2pTransport) -> dict[Lane, ByteStream]:
    lanes = {lane: await open_lane(client, target, lane) for lane in Lane}
    for stream in lanes.values():
        stream.write(GREETING)
        assert await stream.readexactly(4) == GREETING
    return lanes


async def is_closed(stream: ByteStream, seconds: float = 5.0) -> bool:
    try:
        async with asyncio.timeout(seconds):
            while await stream.read(1000):
                pass
            return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


RELAY_RESERVE = b"\x02\x08\x00"
"""A request to reserve a relay slot. Source: libp2p specs, relay/circuit-v2: HopMessage of type RESERVE."""


def test_a_peer_refuses_to_relay(tmp_path: Path) -> None:
    """The daemon grants relay slots to strangers, whatever its flags are."""

    async def scene() -> None:
        async with make(tmp_path, "target")[0] as target, stranger(tmp_path) as (_, client):
            bare = tuple(address.rpartition("/p2p/")[0] for address in target.listen_addresses())
            await client.connect(target.peer, bare, 5)
            stream = await client.open_stream(target.peer, "/libp2p/circuit/relay/0.2.0/hop", 5)
            stream.write(RELAY_RESERVE)
            with pytest.raises(asyncio.IncompleteReadError):
                await stream.readexactly(1)
            stream.abort()

    play(scene())


def test_streams_that_nobody_greets_are_few_and_their_maker_is_named_and_disconnected(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host")
        async with transport, stranger(tmp_path) as (peer, client):
            streams = [await open_lane(client, transport, Lane.BULK) for _ in range(MOST_OF_ONE)]
            assert not any([await is_closed(stream, 0.2) for stream in streams]), "these may still be greeted"
            with contextlib.suppress(PeerError):  # it is disconnected meanwhile
                for _ in range(4 * int(BORNE_AT_ONCE)):
                    streams.append(await open_lane(client, transport, Lane.BULK))
            await heard.wait_until(lambda it: bool(it.nuisances))
            assert {each for each, _ in heard.nuisances} == {peer}
            is_open = [not await is_closed(stream, 0.05) for stream in streams]
            assert sum(is_open) <= MOST_OF_ONE, "it has connected again"
            for writer in streams:
                writer.abort()

    play(scene())


@pytest.mark.parametrize(
    ("bytes_sent", "reason"),
    [
        (b"\x7f\xff\xff\xff", "announced a control frame of 2147483647 bytes where 1 to 262144 are allowed"),
        (b"\x00\x00\x00\x09abc", "sent 3 of 9 bytes of a control frame and disconnected"),
        (b"\x00\x00", "closed the connection within the length of a control frame"),
        (b"\xff\xff\xff\xff" * 9 + b"\x00\x00", "closed the connection within the length of a control frame"),
    ],
)
def test_a_stranger_that_breaks_the_framing_loses_its_link_and_is_named(
    tmp_path: Path, bytes_sent: bytes, reason: str
) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host")
        async with transport, stranger(tmp_path) as (peer, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            stream = lanes[Lane.CONTROL]
            stream.write(bytes_sent)
            stream.write_eof()
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert heard.lost() == [f"{short_peer_id(peer)} {reason}"]
            assert await is_closed(stream)
            assert await is_closed(lanes[Lane.BULK])
            for each in lanes.values():
                each.abort()

    play(scene())


@pytest.mark.parametrize("num_crossed", [1, 2])
def test_crossed_dials_are_repeated_once(num_crossed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers that dial each other at the same moment may, rarely, both act as callers on one connection."""
    monkeypatch.setattr(libp2p, "_BACKOFF_SECONDS", 0.0)

    async def scene() -> None:
        (one, _), (two, heard) = make(tmp_path, "one"), make(tmp_path, "two")
        async with one, two:
            connect, crossed = one.client.connect, iter(range(num_crossed))

            async def cross(peer: PeerId, usable: Sequence[str], seconds: float) -> None:
                if next(crossed, None) is not None:
                    raise DaemonRefusal("failed to dial: * [/ip4/127.0.0.1/tcp/9] message is too short")
                await connect(peer, usable, seconds)

            monkeypatch.setattr(one.client, "connect", cross)
            dialling = one.dial(two.peer, two.listen_addresses(), in_seconds(10))
            if num_crossed == 1:
                await dialling
                await heard.wait_until(lambda it: it.kinds() == ["up"])
            else:
                with pytest.raises(PeerError, match="message is too short"):
                    await dialling

    play(scene())


def test_a_frame_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(frame_seconds=0.3))
        async with transport, stranger(tmp_path) as (_, client):
            lanes = await open_link(client, transport)
            lanes[Lane.BULK].write(b"\x00\x00\x10\x00abc")
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert "did not finish a bulk frame of 4096 bytes in 0.6 s" in heard.lost()[0]
            for each in lanes.values():
                each.abort()

    play(scene())


def test_a_stranger_that_does_not_greet_or_opens_one_lane_gets_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p, "_GREETING_SECONDS", 1.5)

    async def scene() -> None:
        transport, heard = make(tmp_path, "host")
        async with transport, stranger(tmp_path) as (_, client):
            silent, rude, lonely = [await open_lane(client, transport, Lane.CONTROL) for _ in range(3)]
            rude.write(b"GET / HTTP/1.1\r\n\r\n")
            lonely.write(GREETING)
            assert await is_closed(rude, 1.2)
            assert await is_closed(silent)
            assert await is_closed(lonely)
            assert heard.links == []
            for writer in (silent, rude, lonely):
                writer.abort()

    play(scene())


def test_a_stranger_cannot_accumulate_streams(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host")
        async with transport, stranger(tmp_path) as (_, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            more = [await open_lane(client, transport, Lane.BULK) for _ in range(8)]
            for writer in more:
                writer.write(GREETING)
            closed = await asyncio.gather(*(is_closed(stream, 2.0) for stream in more))
            assert sum(closed) == 8 - 1, "who opens a lane again has lost what it opened before"
            assert heard.kinds() == ["up", "lost"]
            for writer in (*lanes.values(), *more):
                writer.abort()

    play(scene())


def test_a_peer_that_closes_one_lane_is_read_to_the_end_on_the_other(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(linger_seconds=20))
        async with transport, stranger(tmp_path) as (peer, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            lanes[Lane.CONTROL].write_eof()
            for index in range(8):  # it sends on the other lane for 0.4 s more
                lanes[Lane.BULK].write(b"\x00\x00\x00\x01" + bytes([index]))
                await asyncio.sleep(0.05)
            lanes[Lane.BULK].write_eof()
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert heard.payloads(Lane.BULK) == [bytes([index]) for index in range(8)]
            assert heard.lost() == [f"{short_peer_id(peer)} closed the connection"]
            for each in lanes.values():
                each.abort()

    play(scene())


def test_a_peer_that_closes_one_lane_is_read_as_long_as_the_other_delivers(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(linger_seconds=1))
        async with transport, stranger(tmp_path) as (peer, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            lanes[Lane.CONTROL].write_eof()
            for index in range(25):  # for two and a half times the linger time
                lanes[Lane.BULK].write(b"\x00\x00\x40\x00" + bytes([index]) * 0x4000)
                await asyncio.sleep(0.1)
            lanes[Lane.BULK].write_eof()
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert [frame[0] for frame in heard.payloads(Lane.BULK)] == list(range(25))
            assert heard.lost() == [f"{short_peer_id(peer)} closed the connection"]
            for each in lanes.values():
                each.abort()

    play(scene())


def test_a_peer_that_ends_both_lanes_loses_the_link_at_once_and_both_streams_are_closed(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(linger_seconds=20))
        async with transport, stranger(tmp_path) as (peer, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            lanes[Lane.BULK].write(b"\x00\x00\x00\x01x" + END + b"\x00\x00\x00\x01y")
            lanes[Lane.CONTROL].write(END)
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"], seconds=5)
            assert heard.payloads(Lane.BULK) == [b"x"], "bytes after the end are ignored"
            assert heard.lost() == [f"{short_peer_id(peer)} closed the connection"]
            assert [await is_closed(stream) for stream in lanes.values()] == [True, True]
            for each in lanes.values():
                each.abort()

    play(scene())


@pytest.mark.parametrize("half_closes", [True, False])
def test_a_peer_that_closes_only_one_lane_loses_the_link_in_bounded_time(half_closes: bool, tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(linger_seconds=0.2))
        async with transport, stranger(tmp_path) as (peer, client):
            lanes = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            writer = lanes[Lane.BULK]
            if half_closes:
                writer.write_eof()
            else:
                writer.write(END)
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert heard.lost() == [f"{short_peer_id(peer)} closed the connection"]
            for each in lanes.values():
                each.abort()

    play(scene())


def test_a_peer_that_returns_before_its_old_link_is_read_to_the_end_gets_a_new_one(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, heard = make(tmp_path, "host", TransportLimits(linger_seconds=0.5))
        async with transport, stranger(tmp_path) as (_, client):
            old = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up"])
            old[Lane.CONTROL].write_eof()
            await asyncio.sleep(0.1)
            new = await open_link(client, transport)
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost", "up"])
            await asyncio.sleep(1.0)  # the end of the old link's time changes nothing
            new[Lane.BULK].write(b"\x00\x00\x00\x01x")
            await heard.wait_until(lambda it: it.payloads(Lane.BULK) == [b"x"])
            assert heard.kinds() == ["up", "lost", "up"]
            for each in (*old.values(), *new.values()):
                each.abort()

    play(scene())


def test_the_death_of_the_daemon_is_reported_once_and_clearly(tmp_path: Path) -> None:
    async def scene() -> None:
        (one, one_heard), (two, two_heard) = make(tmp_path, "one"), make(tmp_path, "two")
        async with one, two:
            await link(one, two, two_heard)
            os.kill(one.daemon.pid, signal.SIGKILL)
            await one_heard.wait_until(lambda it: bool(it.ends))
            assert one_heard.kinds() == ["up", "lost"]
            assert len(one_heard.ends) == 1
            text = str(one_heard.ends[0])
            assert text.startswith("the libp2p daemon of this peer ended (exit code -9")
            assert text.endswith("start this peer again")
            assert not one.post(two.peer, b"hello", lane=Lane.CONTROL, deadline=in_seconds(1))
            with pytest.raises(NetworkError, match="the libp2p daemon of this peer ended"):
                await one.dial(two.peer, two.listen_addresses(), in_seconds(5))
            await two_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])

    play(scene())


def test_a_stopped_daemon_delays_neither_dialling_nor_closing(tmp_path: Path) -> None:
    async def scene() -> None:
        (one, _), (two, _) = make(tmp_path, "one"), make(tmp_path, "two")
        async with two:
            async with one:
                os.kill(one.daemon.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, one.daemon.pid, os.WSTOPPED | os.WNOWAIT)  # its threads may answer until then
                with pytest.raises(PeerError, match="no answer by the deadline"):
                    await one.dial(two.peer, two.listen_addresses(), in_seconds(0.5))
                begun = in_seconds(0)
                os.kill(one.daemon.pid, signal.SIGTERM)
            assert in_seconds(0) - begun < 10

    play(scene())


def test_the_key_of_another_peer_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    async def scene() -> None:
        other = load_or_create_identity(tmp_path / "other.key")
        load_or_create_identity(tmp_path / "own.key")
        transport = Libp2pTransport(
            peer=other.peer, run=RUN, identity_path=tmp_path / "own.key", host_maddrs=[LOOPBACK]
        )
        with pytest.raises(NetworkError, match=r"the key in the identity file belongs to 12D3\.\..*, not 12D3\.\."):
            await transport.__aenter__()
        assert psutil.Process().children(recursive=True) == []
        assert not transport.daemon.directory.exists()

    play(scene())


def test_a_refusal_of_the_daemon_is_raised(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stranger(tmp_path) as (_, client):
            with pytest.raises(DaemonRefusal):
                await client.open_stream(PeerId(bytes(32)), "/nothing", 1)
            with pytest.raises(DaemonRefusal):
                await client.disconnect(PeerId(b"x"))
        with pytest.raises(DaemonRefusal, match="the libp2p daemon does not answer"):
            await client.identify()

    play(scene())


def test_announced_addresses_replace_the_own_ones(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "peer.key"
        key = load_or_create_identity(path)
        public = "/ip4/203.0.113.7/tcp/31337"
        async with Libp2pTransport(
            peer=key.peer, run=RUN, identity_path=path, host_maddrs=[LOOPBACK], announce_maddrs=[public]
        ) as transport:
            assert [address.rpartition("/p2p/")[0] for address in transport.listen_addresses()] == [public]

    play(scene())
