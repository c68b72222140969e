"""Reading of the directory from search results of the DHT. Its use among real daemons is tested in tests/swarm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from p2p_diloco.errors import ConfigError, PeerError
from p2p_diloco.ids import format_peer_id, sha256
from p2p_diloco.signing import SigningKey
from p2p_diloco.testing.network import MemoryNetwork
from p2p_diloco.transport import libp2p_directory
from p2p_diloco.transport.directory import SHARDS, PeerRecord, PeerRole, directory_keys, shard_of, sign_record
from p2p_diloco.transport.libp2p_directory import Libp2pDirectory, group_by_peer
from simulator.virtual_time import run_virtual

RUN = sha256(b"the run")
KEY = SigningKey(sha256(b"key"))
OTHER = SigningKey(sha256(b"other"))
RECORDS = {
    key.peer: sign_record(key, run=RUN, addresses=(), can_be_dialled=False, role=PeerRole.LISTENER, issued_at=1000.0)
    for key in (SigningKey(sha256(b"peer %d" % number)) for number in range(200))
}


@dataclass
class Found:
    """One of hivemind's values with its expiration time."""

    value: Any


@dataclass
class FakeNode:
    """A fake DHT node that holds `records`; searches for `stuck` shards never end, and those for `broken` ones fail."""

    records: Sequence[PeerRecord]
    stuck: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    searches: list[asyncio.Future[Found | None]] = field(default_factory=list)

    async def get_many(self, keys: Sequence[bytes], **_: Any) -> dict[bytes, asyncio.Future[Found | None]]:
        assert tuple(keys) == directory_keys(RUN)
        self.searches = [asyncio.get_running_loop().create_future() for _ in keys]
        for shard, search in enumerate(self.searches):
            held = {r.peer: Found(r.encode()) for r in self.records if shard_of(r.peer) == shard}
            if shard in self.broken:
                search.set_exception(ValueError("not what was expected"))
            elif shard not in self.stuck:
                search.set_result(Found(held) if held else None)
        return dict(zip(keys, self.searches, strict=True))


async def peers_at(node: FakeNode) -> tuple[PeerRecord, ...]:
    transport = MemoryNetwork().transport(OTHER.peer, run=RUN)
    directory = Libp2pDirectory(cast(Any, transport))
    directory._node = node
    return await directory.peers()


def test_records_of_all_shards_are_found_in_the_order_of_peers() -> None:
    found = run_virtual(peers_at(FakeNode(tuple(RECORDS.values()))))
    assert found == tuple(RECORDS[peer] for peer in sorted(RECORDS))
    assert len({shard_of(record.peer) for record in found}) == SHARDS


def test_an_empty_directory_has_no_peers() -> None:
    assert run_virtual(peers_at(FakeNode(()))) == ()


def test_shards_that_do_not_answer_or_fail_do_not_hide_others() -> None:
    async def scene() -> None:
        begun = asyncio.get_running_loop().time()
        node = FakeNode(tuple(RECORDS.values()), stuck=frozenset({1, 4}), broken=frozenset({2}))
        found = await peers_at(node)
        assert {record.peer for record in found} == {peer for peer in RECORDS if shard_of(peer) not in (1, 2, 4)}
        assert asyncio.get_running_loop().time() - begun <= 20.0
        assert all(search.done() for search in node.searches), "searches that nobody waits for are cancelled"

    run_virtual(scene())


@pytest.mark.parametrize("fault", ["stuck", "broken"])
def test_reading_fails_if_no_shard_answers(fault: str) -> None:
    node = FakeNode(tuple(RECORDS.values()), **cast(Any, {fault: frozenset(range(SHARDS))}))
    with pytest.raises(PeerError, match="the directory did not answer within 20 s"):
        run_virtual(peers_at(node))


def test_records_taken_from_a_shard_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_directory, "MOST_STRANGERS", 1)
    found = run_virtual(peers_at(FakeNode(tuple(RECORDS.values()))))
    assert sorted(shard_of(record.peer) for record in found) == list(range(SHARDS))


def test_initial_peers_are_grouped_by_peer_without_this_peer() -> None:
    one, own = (f"/ip4/127.0.0.1/tcp/{{}}/p2p/{format_peer_id(key.peer)}" for key in (KEY, OTHER))
    addresses = [one.format(1), own.format(2), one.format(3)]
    assert group_by_peer(addresses, own=OTHER.peer) == {KEY.peer: (addresses[0], addresses[2])}


def test_an_initial_peer_without_its_id_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="of a bootstrap peer lacks /p2p/<peer id>"):
        group_by_peer(["/ip4/127.0.0.1/tcp/1"], own=OTHER.peer)
