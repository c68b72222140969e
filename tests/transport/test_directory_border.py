"""What the border of the directory lets through to hivemind's own store and parser, and what it changes."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.signing import SigningKey
from p2p_diloco.transport.directory import (
    RECORD_LIFETIME_SECONDS,
    PeerRecord,
    PeerRole,
    directory_key,
    shard_of,
    sign_record,
)
from p2p_diloco.transport.directory_border import DirectoryBorder, forget_cancelled, hivemind_peer, node_id_of
from p2p_diloco.transport.hivemind_border import load_hivemind
from p2p_diloco.transport.strangers import MOST_REQUEST_BYTES, MOST_STRANGERS, DialBudget

load_hivemind()
messages = importlib.import_module("hivemind.proto.dht_pb2")
dht = importlib.import_module("hivemind.dht.protocol")
storage = importlib.import_module("hivemind.dht.storage")
routing = importlib.import_module("hivemind.dht.routing")

RUN, OTHER_RUN = sha256(b"the run"), sha256(b"another run")
KEY = SigningKey(sha256(b"key"))
SENDER = SigningKey(sha256(b"sender")).peer


@dataclass
class FakeTransport:
    """A transport without members."""

    run: Any = RUN
    disturbed: list[PeerId] = field(default_factory=list)

    def is_needed(self, peer: PeerId) -> bool:
        return False

    def disturbed_by(self, peer: PeerId, text: str) -> None:
        self.disturbed.append(peer)


class Host:
    """A border with hivemind's own protocol behind it, which has no network."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.border = DirectoryBorder(cast(Any, self.transport), lambda peer: (), DialBudget())
        self.protocol = dht.DHTProtocol(_initialized_with_create=True)
        self.protocol.storage, self.protocol.cache = storage.DHTLocalStorage(), storage.DHTLocalStorage()
        self.protocol.record_validator = object()
        self.protocol.node_info = messages.NodeInfo()
        self.protocol.routing_table = SimpleNamespace(uid_to_peer_id={})
        self.border.guard(self.protocol)

    async def store(self, request: Any, sender: PeerId = SENDER) -> list[bool]:
        context = SimpleNamespace(remote_id=hivemind_peer(sender))
        raw = await self.border.answer(
            lambda parsed: self.protocol.rpc_store(parsed, context),
            messages.StoreRequest,
            request.SerializeToString(),
            hivemind_peer(sender),
        )
        return list(messages.StoreResponse.FromString(raw).store_ok)

    def held(self, record: PeerRecord) -> Any:
        """Return what is stored for a peer: the value and when it expires; None if nothing."""
        shard = self.border.shard(place_of(record))
        return shard.get(bytes(record.peer)) if shard is not None else None


def place_of(record: PeerRecord) -> bytes:
    return bytes(routing.DHTID.generate(directory_key(record.run, shard_of(record.peer))).to_bytes())


def record(*, issued_at: float | None = None, key: SigningKey = KEY, run: Any = RUN) -> PeerRecord:
    at = issued_at if issued_at is not None else time.time()
    return sign_record(key, run=run, addresses=(), can_be_dialled=False, role=PeerRole.LISTENER, issued_at=at)


def request(*records: PeerRecord, expires_in: float = 300.0) -> Any:
    return messages.StoreRequest(
        keys=[place_of(each) for each in records],
        subkeys=[msgpack.packb(each.peer) for each in records],
        values=[msgpack.packb(each.encode()) for each in records],
        expiration_time=[time.time() + expires_in] * len(records),
        in_cache=[False] * len(records),
    )


def whole_shard(one: PeerRecord, expires_in: float) -> Any:
    """The same record as a whole shard, as nodes hand over what they hold."""
    shard = storage.DictionaryDHTValue()
    shard.store(bytes(one.peer), msgpack.packb(one.encode()), time.time() + expires_in)
    packed = dht.DHTProtocol.serializer.dumps(shard)
    return messages.StoreRequest(
        keys=[place_of(one)],
        subkeys=[b""],
        values=[packed],
        expiration_time=[time.time() + expires_in],
        in_cache=[False],
    )


def act(scene: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scene(Host())

    asyncio.run(main())


def test_a_record_expires_by_what_its_peer_has_signed_whoever_stores_it() -> None:
    async def scene(host: Host) -> None:
        one = record()
        assert await host.store(request(one, expires_in=3000.0)) == [True]
        assert host.held(one).expiration_time == one.issued_at + RECORD_LIFETIME_SECONDS

    act(scene)


@pytest.mark.parametrize("as_shard", [False, True])
def test_nobody_has_a_record_forgotten_by_repeating_it_or_an_older_one(as_shard: bool) -> None:
    async def scene(host: Host) -> None:
        older, one = record(issued_at=time.time() - 60.0), record()
        assert await host.store(request(one)) == [True]
        for replayed in (one, older):
            again = whole_shard(replayed, 1.0) if as_shard else request(replayed, expires_in=1.0)
            await host.store(again)
            assert host.held(one).value == msgpack.packb(one.encode())
            assert host.held(one).expiration_time == one.issued_at + RECORD_LIFETIME_SECONDS
        await asyncio.sleep(1.2)
        assert host.held(one) is not None

    act(scene)


@pytest.mark.parametrize("as_shard", [False, True])
def test_nobody_keeps_an_old_record_by_letting_it_expire_late(as_shard: bool) -> None:
    async def scene(host: Host) -> None:
        older, newer = record(issued_at=time.time() - 60.0), record()
        await host.store(whole_shard(older, 3000.0) if as_shard else request(older, expires_in=3000.0))
        assert host.held(older) is not None
        assert await host.store(request(newer)) == [True]
        assert host.held(newer).value == msgpack.packb(newer.encode())

    act(scene)


def test_records_of_other_runs_and_with_wrong_signatures_are_not_stored() -> None:
    async def scene(host: Host) -> None:
        assert await host.store(request(record(run=OTHER_RUN))) == [False]
        true = record()
        forged = request(true)
        forged.values[0] = msgpack.packb(true.encode()[:-1] + bytes([true.encode()[-1] ^ 1]))
        assert await host.store(forged) == [False]
        assert host.held(true) is None

    act(scene)


def test_a_shard_keeps_a_bounded_number_of_strangers_whoever_stores_them() -> None:
    async def scene(host: Host) -> None:
        keys = [SigningKey(sha256(b"crowd %d" % number)) for number in range(6000)]
        crowd = [record(key=key) for key in keys if shard_of(key.peer) == 3][: 3 * MOST_STRANGERS]
        assert len(crowd) == 3 * MOST_STRANGERS
        for number, one in enumerate(crowd):
            await host.store(request(one), SigningKey(sha256(b"sender %d" % number)).peer)
        assert len(host.border.shard(place_of(crowd[0])).data) == MOST_STRANGERS

    act(scene)


@pytest.mark.parametrize("broken", ["misaligned", "short key", "long", "many"])
def test_a_request_that_no_node_sends_is_refused_whole(broken: str) -> None:
    async def scene(host: Host) -> None:
        one = record()
        asked = request(one)
        if broken == "misaligned":
            asked.in_cache.append(False)
        elif broken == "short key":
            asked.keys[0] = asked.keys[0][:-1]
        elif broken == "long":
            asked.values[0] = bytes(MOST_REQUEST_BYTES)
        else:
            asked = messages.StoreRequest(keys=[asked.keys[0]] * 1000)
        with pytest.raises(FrameError):
            await host.store(asked)
        assert host.held(one) is None

    act(scene)


def test_a_sender_that_goes_on_is_refused_and_reported() -> None:
    async def scene(host: Host) -> None:
        refused = []
        for _ in range(1000):
            try:
                await host.store(request(record()))
            except PeerError as error:
                refused.append(str(error))
        assert set(refused) == {"too many requests"}
        assert len(refused) > 900
        assert set(host.transport.disturbed) == {SENDER}

    act(scene)


def test_an_answer_that_never_expires_does_not_end_a_search() -> None:
    host = Host()
    result = messages.FindResult(type=messages.FOUND_DICTIONARY, value=b"", expiration_time=float("inf"))
    raw = messages.FindResponse(results=[result]).SerializeToString()
    answer = host.border.take_answer(messages.FindResponse, raw, hivemind_peer(SENDER))
    assert answer.results[0].type == messages.NOT_FOUND


def test_ids_of_nodes_that_are_not_the_hash_of_their_peer_are_removed() -> None:
    host, true = Host(), node_id_of(KEY.peer).to_bytes()
    peer = hivemind_peer(KEY.peer).to_bytes()
    result = messages.FindResult(nearest_node_ids=[true, bytes(20)], nearest_peer_ids=[peer, peer])
    raw = messages.FindResponse(results=[result], peer=messages.NodeInfo(node_id=bytes(20))).SerializeToString()
    answer = host.border.take_answer(messages.FindResponse, raw, hivemind_peer(SENDER))
    assert answer.peer.node_id == b""
    assert list(answer.results[0].nearest_node_ids) == [true]


@pytest.mark.parametrize("has_begun", [False, True])
def test_requests_that_are_cancelled_leave_no_task_behind(has_begun: bool) -> None:
    """hivemind drops the tasks of answered requests alone."""
    control = importlib.import_module("hivemind.p2p.p2p_daemon_bindings.control").ControlClient
    asked = SimpleNamespace(proto="find", peer=b"peer", data=b"")

    async def never(data: bytes, peer: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def scene() -> None:
        client = SimpleNamespace(unary_handlers={"find": never}, _handler_tasks={})
        forget_cancelled(client)
        for number in range(3):
            task = asyncio.ensure_future(control._handle_persistent_request(client, number, asked))
            client._handler_tasks[number] = task
            if has_begun:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            await asyncio.sleep(0)
        assert client._handler_tasks == {}

    asyncio.run(scene())
