"""Targets for bytes of strangers: frames, requests to the directory, its answers, and the addresses in them.

`feed` takes one input; its first byte chooses the target. It raises only if something else than a refusal happens.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, format_peer_id, sha256
from p2p_diloco.protocol.wire.messages import decode_message, encode_message, kind_of, longest_frames
from p2p_diloco.transport.directory import MAX_ADDRESSES, MOST_ADDRESSES_SENT, decode_addresses
from p2p_diloco.transport.directory_border import DirectoryBorder, hivemind_peer
from p2p_diloco.transport.hivemind_border import load_hivemind
from p2p_diloco.transport.strangers import DialBudget

RUN, SENDER = sha256(b"the run"), PeerId(sha256(b"sender"))
LONGEST = longest_frames(spans=16, payload_bytes=1 << 16)
MOST_SPANS = 16


def feed(data: bytes) -> None:
    """Give one input to the target that its first byte names."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def a_frame(data: bytes) -> None:
    """Read a frame as a link does: by its head first. What is understood is encoded again as it came."""
    kind = kind_of(data)
    with suppress(FrameError):
        message = decode_message(data)
        assert type(message) is kind, f"{kind} became {message}"
        assert encode_message(message) == data
        spans = getattr(message, "spans", getattr(message, "heads", getattr(message, "digests", ())))
        assert len(data) <= LONGEST[kind] or len(spans) > MOST_SPANS or len(data) > 1 << 16, f"{len(data)} of {kind}"


def told_addresses(data: bytes) -> None:
    """Read the addresses beside an answer: a bounded number, each of the peer that it names."""
    told = decode_addresses(data)
    assert sum(map(len, told.values())) <= MOST_ADDRESSES_SENT
    for peer, addresses in told.items():
        assert 0 < len(addresses) <= MAX_ADDRESSES
        assert all(address.endswith(format_peer_id(peer)) for address in addresses)


def an_answer(data: bytes) -> None:
    """Read an answer of another node, as a search does."""
    if data:
        dht = _dht()
        kind = (dht.messages.PingResponse, dht.messages.FindResponse, dht.messages.StoreResponse)[data[0] % 3]
        with suppress(PeerError, dht.DecodeError):
            _border().border.take_answer(kind, data[1:], hivemind_peer(SENDER))


def a_request(data: bytes) -> None:
    """Answer a request of a stranger with hivemind's own handlers behind the border."""
    if data:
        host, dht = _border(), _dht()
        kind, handle = (
            (dht.messages.PingRequest, host.protocol.rpc_ping),
            (dht.messages.FindRequest, host.protocol.rpc_find),
            (dht.messages.StoreRequest, host.protocol.rpc_store),
        )[data[0] % 3]
        context = SimpleNamespace(remote_id=hivemind_peer(SENDER))
        with suppress(PeerError, dht.DecodeError):
            loop().run_until_complete(
                host.border.answer(lambda parsed: handle(parsed, context), kind, data[1:], hivemind_peer(SENDER))
            )


TARGETS: tuple[Callable[[bytes], None], ...] = (a_frame, told_addresses, an_answer, a_request)


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests."""
    return asyncio.new_event_loop()


@cache
def _dht() -> Any:
    load_hivemind()
    return SimpleNamespace(
        messages=importlib.import_module("hivemind.proto.dht_pb2"),
        protocol=importlib.import_module("hivemind.dht.protocol"),
        storage=importlib.import_module("hivemind.dht.storage"),
        routing=importlib.import_module("hivemind.dht.routing"),
        DecodeError=importlib.import_module("google.protobuf.message").DecodeError,
    )


def _border() -> Any:
    """Return a border with an empty store and full budgets."""
    dht = _dht()
    transport = SimpleNamespace(run=RUN, is_needed=lambda peer: False, disturbed_by=lambda peer, text: None)
    border = DirectoryBorder(cast(Any, transport), lambda peer: (), DialBudget())
    protocol = dht.protocol.DHTProtocol(_initialized_with_create=True)
    protocol.storage, protocol.cache = dht.storage.DHTLocalStorage(), dht.storage.DHTLocalStorage()
    protocol.record_validator, protocol.client_mode = object(), False
    protocol.node_id = dht.routing.DHTID.generate(b"node")
    protocol.node_info, protocol.bucket_size = dht.messages.NodeInfo(node_id=protocol.node_id.to_bytes()), 20
    protocol.routing_table = dht.routing.RoutingTable(protocol.node_id, bucket_size=20, depth_modulo=5)
    protocol.update_routing_table = protocol.call_ping = _no_network
    border.guard(protocol)
    return SimpleNamespace(border=border, protocol=protocol)


async def _no_network(*_: Any, **__: Any) -> None:
    """Ask nobody and note nobody: there is no network."""
