"""A swarm in one process, to try out your own training loop: the shipped peers on an in-memory network."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from torch import nn

from p2p_diloco.api import (
    OnEvent,
    Optimizers,
    OwnLoop,
    OwnState,
    RankPlan,
    Swarm,
    founder_plan,
    joiner_plan,
    new_run,
    start,
)
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId, format_peer_id
from p2p_diloco.session.network import OpenDirectory, transport_limits
from p2p_diloco.session.peer_plan import PeerPlan
from p2p_diloco.signing import SigningKey
from p2p_diloco.testing.network import MemoryDirectory, MemoryNetwork, MemoryTransport
from p2p_diloco.transport.directory import Directory
from p2p_diloco.transport.link import Transport, TransportLimits

SHORT = {"round_seconds": 0.5, "fragments": 2, "spans_per_fragment": 2}


@contextmanager
def local_swarm(**values: Any) -> Iterator[LocalSwarm]:
    """Run a swarm on an in-memory network, to try out a loop that calls `Swarm.step`.

    There is no daemon and no socket, and all files are in a temporary folder. Peers that have not left by the end of
    the block leave then.

    Args:
        values: values of the run, as for `p2p_diloco.new_run`; a round takes half a second unless they set it.
    """
    with tempfile.TemporaryDirectory(prefix="p2p-diloco-") as folder:
        local = LocalSwarm(Path(folder), values)
        try:
            yield local
        finally:
            local.close()


class LocalSwarm:
    """A run whose peers are all in this process. Created by `local_swarm`.

    `found` and `join` are those of `p2p_diloco` without a run file, an invite and settings.
    """

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self._folder = folder
        self._values = {**values, "rounds": SHORT | values.get("rounds", {})}
        self._network = _Network()
        self._loop = _LoopThread()
        self._swarms: list[Swarm] = []

    def found(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        state: OwnState = None,
        until_round: int | None = None,
        on_event: OnEvent | None = None,
    ) -> Swarm:
        """Found the run; call it once. See `p2p_diloco.found`."""
        run = self._folder / "run.toml"
        new_run(run, model, **self._values)
        loop = OwnLoop(
            model=model, optimizer=optimizer, settings=self._settings(), state=state, until_round=until_round
        )
        return self._start(founder_plan(run, loop), on_event=on_event)

    def join(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        state: OwnState = None,
        wait: bool = True,
        timeout: float | None = None,
        until_round: int | None = None,
        on_event: OnEvent | None = None,
    ) -> Swarm:
        """Join the run that was founded; see `p2p_diloco.join`.

        Raises:
            ConfigError: the run has not been founded.
        """
        if not self._swarms:
            raise ConfigError("the local swarm has no founder yet; call found first, then join")
        invite = self._swarms[0].invite
        loop = OwnLoop(
            model=model, optimizer=optimizer, settings=self._settings(), state=state, until_round=until_round
        )
        return self._start(joiner_plan(invite, loop), wait=wait, timeout=timeout, on_event=on_event)

    def close(self) -> None:
        """Make all peers leave, the latest first."""
        try:
            for swarm in reversed(self._swarms):
                swarm.leave()
        finally:
            self._loop.close()

    def _settings(self) -> dict[str, object]:
        return {"state_directory": self._folder / f"peer-{len(self._swarms)}"}

    def _start(self, plan: PeerPlan | RankPlan, **choices: Any) -> Swarm:
        if isinstance(plan, PeerPlan):
            plan = replace(plan, network=self._network)
        swarm = start(plan, run_to_end=self._loop.run_to_end, **choices)
        self._swarms.append(swarm)
        return swarm


class _Network(MemoryNetwork):
    """A memory network with a directory."""

    def __init__(self) -> None:
        super().__init__()
        self._directory: Directory = MemoryDirectory(time.time)

    @asynccontextmanager
    async def online(
        self, settings: PeerSettings, key: SigningKey, run: Digest, *, trains: bool, notify: Callable[[str], None]
    ) -> AsyncIterator[tuple[Transport, OpenDirectory]]:
        """Stay online inside the block."""
        async with self.transport(key.peer, run=run, limits=transport_limits(settings)) as transport:
            yield transport, lambda initial: nullcontext(self._directory)

    def transport(
        self, peer: PeerId, *, run: Digest, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> MemoryTransport:
        return _Transport(self, peer=peer, run=run, can_be_dialled=can_be_dialled, limits=limits)


class _Transport(MemoryTransport):
    """Reports an address in the form that invites need; nothing listens there."""

    def listen_addresses(self) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{format_peer_id(self.peer)}",) if self.can_be_dialled() else ()


class _LoopThread:
    """The event loop that all peers share: a memory network belongs to one loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="p2p_diloco local swarm", daemon=True)
        self._thread.start()

    def run_to_end(self, peer: Coroutine[Any, Any, None]) -> None:
        """Run a peer in the loop and wait until it ends; call this from another thread."""
        asyncio.run_coroutine_threadsafe(peer, self._loop).result()

    def close(self) -> None:
        """Stop the loop and everything that still runs in it."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._wait())

    async def _wait(self) -> None:
        await self._over.wait()
