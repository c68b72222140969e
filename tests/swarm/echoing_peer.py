"""A peer in its own process that sends every frame back: `python echoing_peer.py IDENTITY RUN_HEX`.

It prints its first address, then runs until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import Lane


class Echo:
    """A listener that sends every frame back."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self._transport = transport

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        self._transport.post(peer, frame, lane=lane, deadline=deadline)

    def link_up(self, peer: PeerId) -> None: ...

    def link_lost(self, peer: PeerId, reason: str) -> None: ...

    def disturbed(self, peer: PeerId, text: str) -> None: ...

    def transport_lost(self, error: NetworkError) -> None: ...


async def main(identity_path: Path, run: Digest) -> None:
    key = load_or_create_identity(identity_path)
    transport = Libp2pTransport(
        peer=key.peer, run=run, identity_path=identity_path, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
    )
    transport.serve(Echo(transport))
    async with transport:
        print(transport.listen_addresses()[0], transport.daemon.pid, transport.daemon.directory, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), Digest(bytes.fromhex(sys.argv[2]))))
