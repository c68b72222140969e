"""The memory network fulfils the contract of all transports, in virtual time; and killed peers, and peers twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from p2p_diloco.errors import ConfigError, PeerError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, sha256
from p2p_diloco.testing.network import MemoryNetwork
from p2p_diloco.transport.link import Lane, Transport, TransportLimits
from simulator.virtual_time import run_virtual
from tests.transport.contract import LinkContract
from tests.transport.failure_contract import FailureContract
from tests.transport.stage import RUN, Remote, Stage, act, in_seconds, link


def refuse() -> None:
    raise NotImplementedError("a plain memory network stops nobody")


@dataclass
class MemoryStage(Stage):
    """Peers on one memory network."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    num_peers: int = 0

    def make(
        self, *, run: Digest = RUN, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> Transport:
        self.num_peers += 1
        peer = PeerId(sha256(b"peer %d" % self.num_peers))
        return self.network.transport(peer, run=run, can_be_dialled=can_be_dialled, limits=limits)

    async def add_remote(self) -> Remote:
        transport, recorder = await self.add()
        recorder.echo = transport
        peer = transport.peer
        return Remote(
            peer=peer,
            addresses=transport.listen_addresses(),
            stop=refuse,
            go_on=refuse,
            kill=lambda: self.network.kill(peer),
        )

    def vacant_address(self, peer: PeerId) -> str:
        return f"/memory/1/p2p/{format_peer_id(peer)}"


class TestMemory(LinkContract, FailureContract):
    """`MemoryTransport`."""

    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            await act(MemoryStage(), scene)

        run_virtual(run())


def test_a_killed_peer_receives_nothing_more_and_may_return() -> None:
    async def scene(stage: MemoryStage) -> None:
        (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
        await link(one, two, two_heard)
        stage.network.kill(two.peer)
        stage.network.kill(two.peer)
        assert not two.post(one.peer, b"ghost", lane=Lane.CONTROL, deadline=in_seconds(1))
        with pytest.raises(PeerError, match="this peer is offline"):
            await two.dial(one.peer, one.listen_addresses(), in_seconds(1))
        await asyncio.sleep(1)
        assert one_heard.kinds() == ["up", "lost"]
        assert two_heard.kinds() == ["up"]
        async with stage.network.transport(two.peer, run=RUN) as again:
            await again.dial(one.peer, one.listen_addresses(), in_seconds(1))
            assert one_heard.kinds() == ["up", "lost", "up"]

    run_virtual(act(MemoryStage(), scene))


def test_a_peer_is_online_only_once() -> None:
    async def scene(stage: MemoryStage) -> None:
        one, _ = await stage.add()
        with pytest.raises(ConfigError, match="is already online"):
            await stage.network.transport(one.peer, run=RUN).__aenter__()

    run_virtual(act(MemoryStage(), scene))


def test_a_frame_is_charged_to_the_caps_of_both_ends() -> None:
    async def scene(stage: MemoryStage) -> None:
        one, _ = await stage.add(limits=TransportLimits(upload_bytes_per_second=100_000.0))
        two, heard = await stage.add(limits=TransportLimits(download_bytes_per_second=10_000.0))
        await link(one, two, heard)
        one.post(two.peer, bytes(300_000), lane=Lane.BULK, deadline=in_seconds(60))
        assert one.upload.debt_bytes() == pytest.approx(300_000, rel=0.1)
        assert two.download.debt_bytes() == pytest.approx(300_000, rel=0.1)
        await heard.wait_until(lambda it: it.frames != [], seconds=60)
        assert in_seconds(0) == pytest.approx(30, rel=0.1)

    run_virtual(act(MemoryStage(), scene))
