"""The libp2p transport fulfils the contract of all transports: real daemons on loopback, real time, uvloop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from p2p_diloco.ids import Digest, PeerId, format_peer_id, parse_peer_id
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import Lane, Transport, TransportLimits
from tests.transport.contract import LinkContract
from tests.transport.failure_contract import FailureContract, StopContract
from tests.transport.stage import RUN, Recorder, Remote, Stage, act, in_seconds, link

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass
class Libp2pStage(Stage):
    """Peers with their own daemons, all in this process; remotes are in their own processes."""

    directory: Path = field(default_factory=Path)
    num_peers: int = 0

    def make(
        self, *, run: Digest = RUN, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> Transport:
        path = self._next_identity()
        return Libp2pTransport(
            peer=load_or_create_identity(path).peer,
            run=run,
            identity_path=path,
            host_maddrs=[LOOPBACK],
            dial_out_only=not can_be_dialled,
            limits=limits,
        )

    async def add_remote(self) -> Remote:
        script = Path(__file__).with_name("echoing_peer.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(self._next_identity()), RUN.hex(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        # After the process, wait for its pipe: helpers of a killed process keep it open a moment longer.
        self.exits.push_async_callback(process.stdout.read)
        self.exits.push_async_callback(process.wait)
        self.exits.callback(process.stdin.close)
        line = (await process.stdout.readline()).decode().split()
        address = line[0]
        return Remote(
            peer=parse_peer_id(address.rpartition("/")[2]),
            addresses=(address,),
            stop=lambda: process.send_signal(signal.SIGSTOP),
            go_on=lambda: process.send_signal(signal.SIGCONT),
            kill=process.kill,
        )

    def vacant_address(self, peer: PeerId) -> str:
        return f"/ip4/127.0.0.1/tcp/9/p2p/{format_peer_id(peer)}"

    def _next_identity(self) -> Path:
        self.num_peers += 1
        return self.directory / f"peer-{self.num_peers}.key"


class TestLibp2p(LinkContract, FailureContract, StopContract):
    """`Libp2pTransport`."""

    directory: Path

    @pytest.fixture(autouse=True)
    def _use_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await act(Libp2pStage(directory=self.directory), scene)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    def test_a_peer_that_dials_again_gets_frames_though_its_old_connection_is_still_open(self) -> None:
        async def scene(stage: Libp2pStage) -> None:
            (host, host_heard), (first, _) = await stage.add(), await stage.add(can_be_dialled=False)
            identity = stage.directory / f"peer-{stage.num_peers}.key"
            await link(first, host, host_heard)
            assert isinstance(first, Libp2pTransport)
            os.kill(first.daemon.pid, signal.SIGSTOP)  # from here on as behind a router that forgot the connection
            try:
                second = Libp2pTransport(peer=first.peer, run=RUN, identity_path=identity, dial_out_only=True)
                heard = Recorder()
                second.serve(heard)
                async with second:
                    await second.dial(host.peer, host.listen_addresses(), in_seconds(10))
                    await host_heard.wait_until(lambda it: it.kinds() == ["up", "lost", "up"])
                    assert host.post(first.peer, b"opening", lane=Lane.CONTROL, deadline=in_seconds(10))
                    await heard.wait_until(lambda it: it.payloads(Lane.CONTROL) == [b"opening"])
            finally:
                os.kill(first.daemon.pid, signal.SIGCONT)

        self.play(scene)
