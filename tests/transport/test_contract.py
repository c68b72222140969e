"""The memory transport fulfils the contract of all transports, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.ids import Digest, PeerId, format_peer_id, sha256
from p2p_diloco.transport.link import Transport, TransportLimits
from p2p_diloco.transport.memory import MemoryNetwork
from simulator.virtual_time import run_virtual
from tests.transport.contract import LinkContract
from tests.transport.failure_contract import FailureContract
from tests.transport.stage import RUN, Remote, Stage, act


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
