"""The directory as a DHT: hivemind's `DHTNode` in our own loop, over the p2pd of our transport.

hivemind's wrapper runs it in a second process with a pipe that breaks under uvloop. Every call here ends in bounded
time. Only well-formed, signed peer records are stored or returned, whatever others send.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import secrets
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any, Self

from p2p_diloco.errors import ConfigError, FrameError, NetworkError, PeerError
from p2p_diloco.ids import PeerId, parse_peer_id
from p2p_diloco.transport.addresses import sort_addresses
from p2p_diloco.transport.directory import Directory, PeerRecord, decode_record, directory_key, directory_keys, shard_of
from p2p_diloco.transport.directory_border import DirectoryBorder, hivemind_peer, node_id_of
from p2p_diloco.transport.hivemind_border import load_hivemind
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.strangers import MOST_STRANGERS, DialBudget, choose_peers

logger = logging.getLogger(__name__)

_CALL_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_REVISIT_SECONDS = 60.0
_MAX_CACHED_PEERS = 256
_REPLICAS = 5
_BEAM = 2 * _REPLICAS
"""Nodes queried per shard: enough to find all replicas, and half of hivemind's default."""


class Libp2pDirectory(Directory):
    """The DHT of one run's peers. Enter it after the transport and exit it before.

    Args:
        transport: a started transport; its daemon carries the DHT. If it listens, this peer stores records for others.
        initial_peers: full multiaddrs of peers to join through, as in an invite; empty for the first peer.

    Initial peers and those found later are dialled again periodically, so that an isolated peer, or two separate
    directories, join automatically.
    """

    def __init__(self, transport: Libp2pTransport, *, initial_peers: Sequence[str] = ()) -> None:
        self._transport = transport
        self._initial = group_by_peer(initial_peers, own=transport.peer)
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._dials = DialBudget()
        self._border = DirectoryBorder(
            transport, lambda peer: (*self._known.get(peer, ()), *self._initial.get(peer, ())), self._dials
        )
        self._p2p: Any = None
        self._node: Any = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the DHT node; joining continues in the background."""
        await asyncio.to_thread(load_hivemind)
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                self._p2p = await self._border.attach()
                self._node = await _create_node(self._p2p, self._transport)
                self._border.guard(self._node.protocol)
        except TimeoutError:
            await self._stop()
            raise NetworkError(
                f"the directory did not start on the libp2p daemon within {_CALL_SECONDS:.0f} s"
            ) from None
        self._keeper = asyncio.create_task(self._keep_joined(), name="keep the directory joined")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def num_neighbours(self) -> int:
        """Return the number of other DHT nodes that this one knows."""
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    async def announce(self, record: PeerRecord, expires_at: float) -> None:
        is_client = not self._transport.listen_addresses()
        key = directory_key(record.run, shard_of(record.peer))
        is_stored = await _bounded(
            self._node.store(key, record.encode(), expires_at, subkey=record.peer, exclude_self=is_client)
        )
        if not is_stored:
            raise PeerError(f"none of {self.num_neighbours()} peers of the directory stored the record")

    async def peers(self) -> tuple[PeerRecord, ...]:
        shards = await self._read(directory_keys(self._transport.run))
        self._border.trim_all(directory_keys(self._transport.run))
        draw, is_member = secrets.token_bytes(16), self._transport.is_needed
        found: list[PeerRecord] = []
        for shard in shards:
            for peer in choose_peers(shard, is_member=is_member, most_strangers=MOST_STRANGERS, draw=draw):
                record = _parse_value(shard[peer])
                found += [record] if record is not None else []
        found.sort(key=lambda record: record.peer)
        self._border.remember(record.encode() for record in found)
        self._remember(found)
        return tuple(found)

    async def _read(self, keys: Sequence[bytes]) -> list[dict[bytes, Any]]:
        """Return the values of each of `keys`, by subkey; keys whose search does not end in time are omitted."""
        searches = await _bounded(
            self._node.get_many(keys, sufficient_expiration_time=math.inf, beam_size=_BEAM, return_futures=True)
        )
        try:
            done, _ = await asyncio.wait(searches.values(), timeout=_CALL_SECONDS)
        finally:
            for search in searches.values():
                search.cancel()
        found = [search.result() for search in done if not search.cancelled() and search.exception() is None]
        if not found:
            raise PeerError(f"the directory did not answer within {_CALL_SECONDS:.0f} s")
        return [shard.value for shard in found if shard is not None and isinstance(shard.value, dict)]

    def _remember(self, records: Sequence[PeerRecord]) -> None:
        dialable = [record for record in records if record.addresses and record.peer != self._transport.peer]
        is_needed = self._transport.is_needed
        secrets.SystemRandom().shuffle(dialable)
        for record in sorted(dialable, key=lambda record: not is_needed(record.peer))[:_MAX_CACHED_PEERS]:
            self._known.pop(record.peer, None)
            self._known[record.peer] = record.addresses
        while len(self._known) > _MAX_CACHED_PEERS:
            del self._known[next(iter(self._known))]

    async def _keep_joined(self) -> None:
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            try:
                await self._visit(self._initial)
                if self.num_neighbours() == 0:
                    now = asyncio.get_running_loop().time()
                    known = reversed(self._known.items())  # the latest first
                    await self._visit({peer: at for peer, at in known if self._dials.admits(at, now)})
            except Exception:  # hivemind raises many classes of errors, and joining must continue
                logger.debug("joining the directory failed", exc_info=True)
            if self.num_neighbours() > 0:
                pause = _SHORTEST_PAUSE_SECONDS
                await asyncio.sleep(_REVISIT_SECONDS)
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _visit(self, peers: dict[PeerId, tuple[str, ...]]) -> None:
        async with asyncio.TaskGroup() as group:
            for peer, addresses in tuple(peers.items()):
                group.create_task(self._visit_one(peer, addresses))

    async def _visit_one(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Connect to one peer, so that both add each other to their routing tables."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._transport.client.connect(peer, sort_addresses(peer, addresses), _CONNECT_SECONDS)
                await self._node.protocol.call_ping(hivemind_peer(peer))
        except (TimeoutError, PeerError):
            return  # it is visited again

    async def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._node is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._node.shutdown()
            except Exception as error:  # the daemon may be dead already
                logger.debug("the directory was left in a hurry: %r", error)
        if self._p2p is not None:
            await self._p2p.shutdown()
        self._node = self._p2p = self._keeper = None


async def _bounded(call: Awaitable[Any]) -> Any:
    """Await one call to the DHT; convert any error in it into a PeerError."""
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            return await call
    except TimeoutError:
        raise PeerError(f"the directory did not answer within {_CALL_SECONDS:.0f} s") from None
    except Exception as error:  # hivemind raises many classes of errors
        raise PeerError(f"the directory failed: {error!r}") from error


def _parse_value(found: Any) -> PeerRecord | None:
    try:
        return decode_record(bytes(found.value))
    except (FrameError, TypeError, ValueError):
        return None


def group_by_peer(addresses: Sequence[str], *, own: PeerId) -> dict[PeerId, tuple[str, ...]]:
    grouped: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        _, mark, text = address.rpartition("/p2p/")
        if not mark:
            raise ConfigError(f"the address {address} of a bootstrap peer lacks /p2p/<peer id>")
        peer = parse_peer_id(text)
        if peer != own:
            grouped[peer] = (*grouped.get(peer, ()), address)
    return grouped


async def _create_node(p2p: Any, transport: Libp2pTransport) -> Any:
    dht_module = importlib.import_module("hivemind.dht.node")
    return await dht_module.DHTNode.create(
        p2p=p2p,
        node_id=node_id_of(transport.peer),
        client_mode=not transport.listen_addresses(),
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        num_replicas=_REPLICAS,
        ensure_bootstrap_success=False,
        strict=False,
    )
