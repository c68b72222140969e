"""The directory among real daemons: joining, finding, records of strangers, bootstrap peers that are late or gone."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import format_peer_id
from p2p_diloco.signing import SigningKey
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport import libp2p_directory
from p2p_diloco.transport.directory import SHARDS, PeerRecord, PeerRole, directory_key, shard_of, sign_record
from p2p_diloco.transport.directory_border import hivemind_peer
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.libp2p_directory import Libp2pDirectory
from tests.transport.stage import RUN, in_seconds

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def act() -> None:
        async with asyncio.timeout(60):
            await scene

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act())


def make(
    directory: Path, name: str, *, host_maddr: str = LOOPBACK, dial_out_only: bool = False
) -> tuple[Libp2pTransport, SigningKey]:
    path = directory / f"{name}.key"
    key = load_or_create_identity(path)
    transport = Libp2pTransport(
        peer=key.peer, run=RUN, identity_path=path, host_maddrs=[host_maddr], dial_out_only=dial_out_only
    )
    return transport, key


def record_of(transport: Libp2pTransport, key: SigningKey) -> PeerRecord:
    addresses = transport.listen_addresses()
    return sign_record(
        key,
        run=RUN,
        addresses=addresses,
        can_be_dialled=bool(addresses),
        role=PeerRole.TRAINER,
        issued_at=time.time(),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_for_peers(directory: Libp2pDirectory, count: int) -> tuple[PeerRecord, ...]:
    while len(found := await directory.peers()) < count:
        await asyncio.sleep(0.05)
    return found


async def wait_for_record(directory: Libp2pDirectory, record: PeerRecord) -> None:
    while record not in await directory.peers():
        await asyncio.sleep(0.05)


async def wait_for_neighbours(directory: Libp2pDirectory, count: int) -> None:
    while directory.num_neighbours() < count:
        await directory.peers()  # every peer asked becomes a neighbour
        await asyncio.sleep(0.05)


def test_peers_find_each_other_through_a_known_one(tmp_path: Path) -> None:
    async def scene() -> None:
        (boot, boot_key), (one, one_key) = make(tmp_path, "boot"), make(tmp_path, "one")
        hidden, hidden_key = make(tmp_path, "hidden", dial_out_only=True)
        async with boot, one, hidden, Libp2pDirectory(boot) as at_boot:
            invited = boot.listen_addresses()
            async with (
                Libp2pDirectory(one, initial_peers=invited) as at_one,
                Libp2pDirectory(hidden, initial_peers=invited) as at_hidden,
            ):
                for place in (at_one, at_hidden):
                    await wait_for_neighbours(place, 1)
                records = []
                for place, transport, key in (
                    (at_boot, boot, boot_key), (at_one, one, one_key), (at_hidden, hidden, hidden_key)
                ):  # fmt: skip
                    records.append(record_of(transport, key))
                    await place.announce(records[-1], time.time() + 600)
                expected = tuple(sorted(records, key=lambda record: record.peer))
                for place in (at_boot, at_one, at_hidden):
                    assert await wait_for_peers(place, 3) == expected
                found = next(record for record in expected if record.peer == one.peer)
                await hidden.dial(found.peer, found.addresses, in_seconds(10))
                newer = record_of(one, one_key)
                await at_one.announce(newer, time.time() + 700)
                await wait_for_record(at_hidden, newer)

    play(scene())


def test_if_nobody_answers_no_record_is_stored(tmp_path: Path) -> None:
    async def scene() -> None:
        transport, key = make(tmp_path, "one", dial_out_only=True)
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{format_peer_id(SigningKey(bytes(32)).peer)}"
        async with transport, Libp2pDirectory(transport, initial_peers=[nobody]) as directory:
            with pytest.raises(PeerError, match="none of 0 peers of the directory stored the record"):
                await directory.announce(record_of(transport, key), time.time() + 600)
            assert await directory.peers() == ()

    play(scene())


def test_a_joiner_whose_first_peers_are_dead_joins_the_directory_through_another(tmp_path: Path) -> None:
    async def scene() -> None:
        (member, _), (one, _) = make(tmp_path, "member"), make(tmp_path, "one")
        dead = [
            f"/ip4/127.0.0.1/tcp/9/p2p/{format_peer_id(SigningKey(bytes([number]) * 32).peer)}" for number in range(20)
        ]
        async with member, one, Libp2pDirectory(member):
            initial = (*dead, *member.listen_addresses())
            async with Libp2pDirectory(one, initial_peers=initial) as at_one:
                await wait_for_neighbours(at_one, 1)
                assert at_one.num_neighbours() == 1

    play(scene())


def test_a_late_bootstrap_peer_is_joined_automatically(tmp_path: Path) -> None:
    async def scene() -> None:
        port = free_port()
        boot, boot_key = make(tmp_path, "boot", host_maddr=f"/ip4/127.0.0.1/tcp/{port}")
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(boot.peer)}"
        one, one_key = make(tmp_path, "one")
        async with one, Libp2pDirectory(one, initial_peers=[address]) as at_one:
            await at_one.announce(record_of(one, one_key), time.time() + 600)
            assert len(await at_one.peers()) == 1
            async with boot, Libp2pDirectory(boot) as at_boot:
                await wait_for_neighbours(at_one, 1)
                await at_boot.announce(record_of(boot, boot_key), time.time() + 600)
                await wait_for_peers(at_one, 2)
                await wait_for_peers(at_boot, 2)  # the record stored alone was handed over

    play(scene())


def test_two_directories_merge_through_a_peer_that_knows_both(tmp_path: Path) -> None:
    async def scene() -> None:
        (one, one_key), (two, two_key), (both, _) = (make(tmp_path, name) for name in ("one", "two", "both"))
        async with one, two, both, Libp2pDirectory(one) as at_one, Libp2pDirectory(two) as at_two:
            records = [record_of(one, one_key), record_of(two, two_key)]
            for place, record in zip((at_one, at_two), records, strict=True):
                await place.announce(record, time.time() + 600)
                assert await place.peers() == (record,), "they have not met"
            invited = (*one.listen_addresses(), *two.listen_addresses())
            async with Libp2pDirectory(both, initial_peers=invited):
                for place in (at_one, at_two):
                    await wait_for_peers(place, 2)
                    await wait_for_neighbours(place, 2)
            later = record_of(one, one_key)
            await at_one.announce(later, time.time() + 700)
            await wait_for_record(at_two, later)  # the peer that connected them is gone

    play(scene())


def test_a_late_bootstrap_peer_merges_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_directory, "_REVISIT_SECONDS", 0.5)

    async def scene() -> None:
        port = free_port()
        (one, one_key), (both, _) = make(tmp_path, "one"), make(tmp_path, "both")
        two, two_key = make(tmp_path, "two", host_maddr=f"/ip4/127.0.0.1/tcp/{port}")
        late = f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(two.peer)}"
        async with (
            one,
            both,
            Libp2pDirectory(one) as at_one,
            Libp2pDirectory(both, initial_peers=(*one.listen_addresses(), late)) as at_both,
        ):
            await wait_for_neighbours(at_both, 1)
            async with two, Libp2pDirectory(two) as at_two:
                record = record_of(one, one_key)
                await at_one.announce(record, time.time() + 600)
                await wait_for_record(at_two, record)
                record = record_of(two, two_key)
                await at_two.announce(record, time.time() + 600)
                await wait_for_record(at_one, record)

    play(scene())


async def unguarded(transport: Libp2pTransport) -> Any:
    """Return hivemind's own handle for the daemon of a stranger."""
    theirs = importlib.import_module("hivemind.p2p").P2P
    ours: Any = type("P2P", (theirs,), {"_UNIX_SOCKET_PREFIX": f"/unix{transport.daemon.directory}/"})
    maddr_class = importlib.import_module("hivemind.utils.multiaddr").Multiaddr
    return await ours.replicate(maddr_class(f"/unix{transport.daemon.control_path}"))


async def send_store(
    transport: Libp2pTransport, target: Libp2pTransport, subkey: bytes, value: bytes, *, shard: int = 0
) -> Any:
    """Ask `target`'s DHT to store raw bytes, as any stranger can."""
    bare = tuple(address.rpartition("/p2p/")[0] for address in target.listen_addresses())
    await transport.client.connect(target.peer, bare, 5)
    protocol = importlib.import_module("hivemind.dht.protocol").DHTProtocol
    messages = importlib.import_module("hivemind.proto.dht_pb2")
    key = importlib.import_module("hivemind.dht.routing").DHTID.generate(directory_key(RUN, shard))
    p2p = await unguarded(transport)
    servicer = importlib.import_module("hivemind.p2p").ServicerBase
    get_stub = servicer.get_stub.__func__
    stub = get_stub(protocol, p2p, hivemind_peer(target.peer))
    request = messages.StoreRequest(
        keys=[key.to_bytes()], subkeys=[subkey], values=[value], expiration_time=[time.time() + 60], in_cache=[False]
    )
    try:
        return list((await stub.rpc_store(request, timeout=5)).store_ok)
    except Exception as error:  # hivemind returns the host's error as an exception
        return type(error).__name__
    finally:
        await p2p.shutdown()


def test_invalid_records_of_strangers_neither_crash_nor_stay(tmp_path: Path) -> None:
    async def scene() -> None:
        (host, host_key), (stranger, key) = make(tmp_path, "host"), make(tmp_path, "stranger", dial_out_only=True)
        async with host, stranger, Libp2pDirectory(host) as directory:
            for subkey in (b"", msgpack.packb(bytes(32))):  # a whole dictionary, and one entry of it
                for value in (b"\x91" * 1900 + b"\xc0", msgpack.packb(b"unsigned")):
                    assert await send_store(stranger, host, subkey, value) in ([False], "P2PHandlerError")
            subkey, value = msgpack.packb(key.peer), msgpack.packb(record_of(stranger, key).encode())
            own = shard_of(key.peer)
            assert await send_store(stranger, host, subkey, value, shard=(own + 1) % SHARDS) == [False]
            assert await directory.peers() == ()
            await directory.announce(record_of(host, host_key), time.time() + 600)
            assert len(await directory.peers()) == 1
            other, other_key = make(tmp_path, "other stranger", dial_out_only=True)
            subkey, value = msgpack.packb(other.peer), msgpack.packb(record_of(other, other_key).encode())
            async with other:
                shard = shard_of(other.peer)
                assert await send_store(other, host, subkey, value, shard=shard) == [True], "its own record is accepted"
            assert len(await directory.peers()) == 2

    play(scene())


def test_without_its_daemon_the_directory_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_directory, "_CALL_SECONDS", 1.0)

    async def scene() -> None:
        (boot, _), (one, one_key) = make(tmp_path, "boot"), make(tmp_path, "one", dial_out_only=True)
        async with boot, Libp2pDirectory(boot), one:
            async with Libp2pDirectory(one, initial_peers=boot.listen_addresses()) as directory:
                await wait_for_neighbours(directory, 1)
                os.kill(one.daemon.pid, signal.SIGKILL)
                begun = in_seconds(0)
                with pytest.raises(PeerError, match="the directory"):
                    await directory.announce(record_of(one, one_key), time.time() + 600)
            assert in_seconds(0) - begun < 15

    play(scene())
