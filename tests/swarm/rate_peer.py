"""A peer that floods another with vectors, or only receives them: `rate_peer.py KEY RUN HOST UP DOWN SECONDS [PEER]`.

UP and DOWN are caps in bytes per second, 0 for none. It prints its address. With PEER, an address, it dials that peer
and keeps frames waiting for SECONDS after a warm-up; without, it listens until its standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from p2p_diloco.config.invite import parse_peer_address
from p2p_diloco.ids import Digest
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import MIB, Lane, TransportLimits

WARM_UP_SECONDS = 3.0


async def main(key: str, run: str, host: str, up: str, down: str, seconds: str, peer: str | None = None) -> None:
    transport = Libp2pTransport(
        peer=load_or_create_identity(Path(key)).peer,
        run=Digest(bytes.fromhex(run)),
        identity_path=Path(key),
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        limits=TransportLimits(
            upload_bytes_per_second=float(up) or None, download_bytes_per_second=float(down) or None, linger_seconds=0.1
        ),
    )
    loop = asyncio.get_running_loop()
    async with transport:
        print(next(a for a in transport.listen_addresses() if host in a), flush=True)
        if peer is None:
            await loop.run_in_executor(None, sys.stdin.read)
            return
        address, other = parse_peer_address(peer)
        await transport.dial(other, [address], loop.time() + 20)
        end = loop.time() + WARM_UP_SECONDS + float(seconds)
        bulk = transport.counters.bulk
        while loop.time() < end:
            while bulk.bytes_waiting < 4 * MIB:
                if not transport.post(other, bytes(MIB), lane=Lane.BULK, deadline=end + 600):
                    raise SystemExit("the link is gone")
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
