"""The border between hivemind's DHT and the network: every request and every answer passes here, in both directions.

What arrives is counted before it is parsed, and what it may store is bounded. Answers name neighbours with their
addresses, which hivemind would look up in a DHT of the libp2p daemon that we do not run.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.transport.addresses import sort_addresses
from p2p_diloco.transport.directory import (
    MAX_ADDRESSES,
    MAX_LIFETIME_SECONDS,
    MOST_AHEAD_SECONDS,
    PeerRecord,
    decode_addresses,
    encode_addresses,
    expiry_of,
    is_acceptable,
    parse_record,
    record_in,
    subkey_of,
)
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.rate_limit import TokenBucket
from p2p_diloco.transport.strangers import (
    MOST_ANSWER_BYTES,
    MOST_KEYS,
    MOST_NEIGHBOURS,
    MOST_NEW,
    MOST_NODES,
    MOST_REQUEST_BYTES,
    MOST_STRANGERS,
    MOST_VALUES,
    CallBudgets,
    DialBudget,
    choose_peers,
)

_CONNECT_SECONDS = 5.0
_CONNECTED_SECONDS = 120.0
_KEY_BYTES = 20
_WHOLE_SHARD = b""
"""hivemind's mark of a whole shard in place of one entry."""
MOST_SENT_OF_ONE = 2
_MOST_NAMED = 1024
_HANDED_OVER_PER_SECOND, _HANDED_OVER_AT_ONCE = 16384.0, 1048576.0
"""Limit in bytes for whole shards, which hivemind sends to each new node that claims to be near their keys."""
_TOO_MANY = "sends the directory more requests than are answered; closing its connection"
_ED25519_ID_BYTES = 38


class DirectoryBorder:
    """The border of one directory.

    Args:
        transport: it carries the requests, and knows which peers are members.
        addresses_of: returns the known addresses of a peer, or none.
        dials: budget for dials to addresses that others name.
    """

    def __init__(
        self, transport: Libp2pTransport, addresses_of: Callable[[PeerId], Sequence[str]], dials: DialBudget
    ) -> None:
        self._known_records: frozenset[bytes] = frozenset()
        self._transport = transport
        self._addresses_of = addresses_of
        self._dials = dials
        self._budgets = CallBudgets(lambda peer: transport.is_needed(peer))
        self._named: dict[PeerId, tuple[str, ...]] = {}
        self._connected_at: dict[PeerId, float] = {}
        self._handing_over = TokenBucket(per_second=_HANDED_OVER_PER_SECOND, burst=_HANDED_OVER_AT_ONCE)
        self._protocol: Any = None

    def remember(self, records: Iterable[bytes]) -> None:
        """Take these encoded records without a check when they are read again."""
        self._known_records = frozenset(records)

    async def attach(self) -> Any:
        """Return hivemind's handle for our daemon, with its sockets in our directory and its calls through here."""
        theirs = importlib.import_module("hivemind.p2p").P2P
        maddr_class = importlib.import_module("hivemind.utils.multiaddr").Multiaddr
        border = self

        async def call(self: Any, peer_id: Any, name: str, request: Any, answer_class: Any) -> Any:
            await border._connect(_peer_of(peer_id))
            raw = await self._client.call_unary_handler(peer_id, name, request.SerializeToString())
            return border.take_answer(answer_class, raw, peer_id)

        async def serve(self: Any, name: str, handler: Any, request_class: Any, balanced: bool = False) -> None:
            async def answer(request: bytes, remote_id: Any) -> bytes:
                context = importlib.import_module("hivemind.p2p").P2PContext(
                    handle_name=name, local_id=self.peer_id, remote_id=remote_id
                )
                return await border.answer(lambda parsed: handler(parsed, context), request_class, request, remote_id)

            await self._client.add_unary_handler(name, answer, balanced=balanced)

        ours: Any = type(
            "P2P",
            (theirs,),
            {
                "_UNIX_SOCKET_PREFIX": f"/unix{self._transport.daemon.directory}/",
                "_call_unary_protobuf_handler": call,
                "_add_protobuf_unary_handler": serve,
            },
        )
        handle = await ours.replicate(maddr_class(f"/unix{self._transport.daemon.control_path}"))
        forget_cancelled(handle._client.control)
        return handle

    def guard(self, protocol: Any) -> None:
        """Check what hivemind's protocol reads and stores with our own rules instead of its own."""
        self._protocol = protocol
        protocol._validate_record = lambda key, subkey, value, expires_at: is_acceptable(
            self._transport.run, key, subkey, value, expires_at, time.time()
        )
        protocol._validate_dictionary = self._choose_records
        store = protocol.call_store

        async def call_store(peer: Any, keys: Sequence[Any], values: Sequence[Any], *rest: Any, **more: Any) -> Any:
            handed_over = sum(len(item.value) for shard in values for item in getattr(shard, "data", {}).values())
            if handed_over and not self._handing_over.has_one(asyncio.get_running_loop().time()):
                return None
            self._handing_over.spend(handed_over, asyncio.get_running_loop().time())
            return await store(peer, keys, values, *rest, **more)

        protocol.call_store = call_store

    # -- requests of this peer

    async def _connect(self, peer: PeerId) -> None:
        """Connect the daemon to `peer` if it is not linked and its addresses are known.

        Raises:
            PeerError: it cannot be reached.
        """
        now = asyncio.get_running_loop().time()
        if peer in self._transport.linked_peers():
            return
        self._connected_at = {each: at for each, at in self._connected_at.items() if now - at < _CONNECTED_SECONDS}
        known, named = self._addresses_of(peer), self._named.get(peer, ())
        if peer in self._connected_at or not (known or named):
            return
        if not known and not self._dials.admits(named, now):
            raise PeerError("too many addresses of strangers were dialled lately")
        async with asyncio.timeout(_CONNECT_SECONDS):
            await self._transport.client.connect(peer, sort_addresses(peer, (*known, *named)), _CONNECT_SECONDS)
        self._connected_at[peer] = now

    def take_answer(self, answer_class: Any, raw: bytes, peer_id: Any) -> Any:
        """Parse an answer, and remove what is false in it."""
        if len(raw) > MOST_ANSWER_BYTES:
            raise FrameError(f"an answer of the directory takes {len(raw)} bytes; {MOST_ANSWER_BYTES} are allowed")
        answer = answer_class.FromString(raw)
        if len(getattr(answer, "results", ())) > MOST_KEYS:
            raise FrameError(f"an answer of the directory has {len(answer.results)} results")
        _drop_false_ids(answer, peer_id.to_bytes())
        latest = time.time() + MOST_AHEAD_SECONDS + MAX_LIFETIME_SECONDS
        for result in getattr(answer, "results", ()):
            if not result.expiration_time <= latest:  # it would end the search
                result.ClearField("type")
        self._take_addresses(raw)
        return answer

    def _take_addresses(self, raw: bytes) -> None:
        for peer, addresses in decode_addresses(raw).items():
            self._named[peer] = tuple(dict.fromkeys((*self._named.get(peer, ()), *addresses)))[-MAX_ADDRESSES:]
        while len(self._named) > _MOST_NAMED:
            del self._named[next(iter(self._named))]

    # -- requests of others

    async def answer(
        self, handle: Callable[[Any], Awaitable[Any]], request_class: Any, request: bytes, remote_id: Any
    ) -> bytes:
        """Answer a request if its sender's budget allows it; what is raised goes to the sender as an error."""
        peer, now = _peer_of(remote_id), asyncio.get_running_loop().time()
        if self._protocol is None:
            raise PeerError("the directory is starting")
        if not self._budgets.admits_call(peer, now):
            self._refuse(peer, now)
            raise PeerError("too many requests")
        if len(request) > MOST_REQUEST_BYTES:
            raise FrameError(f"a request takes {len(request)} bytes; {MOST_REQUEST_BYTES} are allowed")
        parsed = request_class.FromString(request)
        _drop_false_ids(parsed, remote_id.to_bytes())
        table = self._protocol.routing_table.uid_to_peer_id
        if len(table) >= MOST_NODES and not self._transport.is_needed(peer):
            parsed.ClearField("peer")
        keys, is_store = list(getattr(parsed, "keys", ())), hasattr(parsed, "values")
        if len(keys) > (MOST_VALUES if is_store else MOST_KEYS) or any(len(key) != _KEY_BYTES for key in keys):
            raise FrameError(f"{len(keys)} keys are in a request, or some have another length than {_KEY_BYTES} bytes")
        answer = await (self._store(handle, parsed, peer, now) if is_store else handle(parsed))
        encoded = bytes(answer.SerializeToString()) + self._addresses_for(answer)
        self._budgets.charge(peer, len(encoded), now)
        return encoded

    async def _store(self, handle: Callable[[Any], Awaitable[Any]], request: Any, peer: PeerId, now: float) -> Any:
        """Store the records that the sender's budget allows; return an answer about all of them."""
        names = ("keys", "subkeys", "values", "expiration_time", "in_cache")
        fields = {name: list(getattr(request, name)) for name in names}
        keys, values = fields["keys"], fields["values"]
        if any(len(items) != len(keys) for items in fields.values()):
            raise FrameError("the lists of a request differ in length")
        fields["in_cache"] = [False] * len(keys)  # what is cached would not be bounded
        allowed: list[int] = []
        for index, value in enumerate(values):
            if not self._budgets.admits_record(peer, len(value), now):
                self._refuse(peer, now)
                break
            if fields["subkeys"][index] != _WHOLE_SHARD:
                record = self._newer(keys[index], value)
                if record is None:
                    continue
                fields["expiration_time"][index] = expiry_of(record)
            allowed.append(index)
        for name in names:
            getattr(request, name)[:] = [fields[name][index] for index in allowed]
        try:
            answer = await handle(request)
        finally:
            for key in set(request.keys):
                self._trim(key)
        stored = dict(zip(allowed, answer.store_ok, strict=True))
        answer.store_ok[:] = [stored.get(index, False) for index in range(len(values))]
        return answer

    def _newer(self, key: bytes, value: bytes) -> PeerRecord | None:
        """Return the record in a value if its peer has signed it later than the one that is held, else None.

        hivemind keeps what expires last, and forgets a record when any repetition of it expires. The time of expiry is
        not signed, so anybody could keep an old record here, or have a new one forgotten.
        """
        held = self.shard(key)
        try:
            record = parse_record(record_in(value))
        except FrameError:
            return None
        known = held.data.get(bytes(record.peer)) if held is not None else None
        is_newer = known is None or parse_record(record_in(known.value)).issued_at < record.issued_at
        return record if is_newer else None

    def shard(self, key: bytes) -> Any:
        """Return the stored shard with this key, or None."""
        dht_id = importlib.import_module("hivemind.dht.routing").DHTID.from_bytes(key)
        held = self._protocol.storage.get(dht_id)
        return held.value if held is not None and hasattr(held.value, "data") else None

    def trim_all(self, keys: Sequence[bytes]) -> None:
        """Bound the stored shards of these directory keys again: a search adds what it finds to them."""
        for key in keys if self._protocol is not None else ():
            self._trim(hashlib.sha1(key).digest())

    def _refuse(self, peer: PeerId, now: float) -> None:
        if self._budgets.is_used_up(peer, now):
            self._transport.disturbed_by(peer, _TOO_MANY)

    def _trim(self, key: bytes) -> None:
        """Delete records of strangers at random if a shard of the store has too many."""
        held, is_member = self.shard(key), self._transport.is_needed
        shard = held.data if held is not None else {}
        kept = choose_peers(shard, is_member=is_member, most_strangers=MOST_STRANGERS, draw=secrets.token_bytes(16))
        for subkey in shard.keys() - kept:
            del held[subkey]

    def _addresses_for(self, answer: Any) -> bytes:
        named = {raw for result in getattr(answer, "results", ()) for raw in result.nearest_peer_ids}
        peers = [PeerId(raw[-32:]) for raw in named if len(raw) == _ED25519_ID_BYTES]
        secrets.SystemRandom().shuffle(peers)
        return encode_addresses(address for peer in peers for address in self._addresses_of(peer)[:MOST_SENT_OF_ONE])

    def _choose_records(self, key: bytes, shard: Any) -> bool:
        """Keep only acceptable records in a shard that another peer sent; return False to refuse all of it.

        Records that were read before are kept, of new ones those of members and a sample of the rest: each signature
        takes 0.1 ms to check. A wrong one proves that the sender does not check what it stores.
        """
        now, is_member = time.time(), self._transport.is_needed

        def is_fit(subkey: bytes, *, checks_signature: bool) -> bool:
            value, expires_at = shard.data[subkey]
            own_key = subkey_of(subkey)
            run = self._transport.run
            return is_acceptable(run, key, own_key, value, expires_at, now, checks_signature=checks_signature)

        fit = [each for each in shard.data if isinstance(each, bytes) and is_fit(each, checks_signature=False)]
        found = {each: self._newer(key, shard.data[each].value) for each in fit}
        records = {each: record for each, record in found.items() if record is not None}
        old = {each for each in records if record_in(shard.data[each].value) in self._known_records}
        draw = secrets.token_bytes(16)
        new = choose_peers(records.keys() - old, is_member=is_member, most_strangers=MOST_NEW, draw=draw)
        if not all(is_fit(subkey, checks_signature=True) for subkey in new):
            return False
        kept = {each: (shard.data[each].value, expiry_of(records[each])) for each in old | new}
        for subkey in tuple(shard.data):
            del shard[subkey]
        shard.maxsize, shard.latest_expiration_time = math.inf, -math.inf
        with shard.freeze():
            for subkey, (value, expires_at) in kept.items():
                shard.store(subkey, value, expires_at)
        return True


class _Tasks(dict[Any, Any]):
    """Tasks by call, each dropped when it ends; hivemind keeps those of requests that are cancelled."""

    def __setitem__(self, call: Any, task: Any) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))

    def pop(self, call: Any, default: Any = None) -> Any:
        return super().pop(call, default)


def forget_cancelled(control: Any) -> None:
    """Have hivemind drop the tasks of requests that are cancelled, even before they begin."""
    control._handler_tasks = _Tasks(control._handler_tasks)


def node_id_of(peer: PeerId) -> Any:
    """Return the DHT's id of a peer: a hash, so that nobody can be many nodes, or choose the place of one."""
    return importlib.import_module("hivemind.dht.routing").DHTID.generate(bytes(peer))


def _drop_false_ids(message: Any, sender: bytes) -> None:
    """Remove the id of the sender, and of neighbours that it names, from a message where it is not the peer's hash."""

    def is_true(node_id: bytes, peer: bytes) -> bool:
        return len(peer) == _ED25519_ID_BYTES and node_id == node_id_of(PeerId(peer[-32:])).to_bytes()

    if message.peer.node_id and not is_true(message.peer.node_id, sender):
        message.ClearField("peer")
    for result in getattr(message, "results", ()):
        named = list(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False))[:MOST_NEIGHBOURS]
        true = [pair for pair in named if is_true(*pair)]
        result.nearest_node_ids[:] = [node_id for node_id, _ in true]
        result.nearest_peer_ids[:] = [peer for _, peer in true]


def hivemind_peer(peer: PeerId) -> Any:
    return importlib.import_module("hivemind.p2p").PeerID.from_base58(format_peer_id(peer))


def _peer_of(peer_id: Any) -> PeerId:
    raw = bytes(peer_id.to_bytes())
    if len(raw) != _ED25519_ID_BYTES:
        raise PeerError("a peer whose key is not Ed25519 is not supported")
    return PeerId(raw[-32:])
