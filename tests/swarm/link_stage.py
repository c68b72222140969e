"""Peers reduced to their links: one memory network, one directory, and link keepers with their reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.signing import SigningKey
from p2p_diloco.testing.network import MemoryDirectory, MemoryTransport
from p2p_diloco.transport.directory import PeerRecord, PeerRole, sign_record
from simulator.faulty_network import FaultyNetwork
from simulator.virtual_time import run_virtual

RUN = sha256(b"the run")
ANN, BEN, CLEO, DAN, EVE = (SigningKey(sha256(name)) for name in (b"ann", b"ben", b"cleo", b"dan", b"eve"))


def now() -> float:
    return asyncio.get_running_loop().time()


class Noticeboard(MemoryDirectory):
    """A directory that records when it was read."""

    def __init__(self) -> None:
        super().__init__(now)
        self.looks: list[float] = []

    async def peers(self) -> tuple[PeerRecord, ...]:
        self.looks.append(now())
        return await super().peers()

    def looks_since(self, begin: float) -> int:
        return sum(at > begin for at in self.looks)


class Scene:
    """One network, one directory, and link keepers with their reports."""

    def __init__(self, exits: AsyncExitStack) -> None:
        self.network = FaultyNetwork(1)
        self.directory = Noticeboard()
        self.heard: list[tuple[str, str]] = []
        self.dials: list[tuple[float, PeerId]] = []
        self._exits = exits
        self._tasks: list[asyncio.Task[None]] = []

    async def transport(self, key: SigningKey, *, dialable: bool = True) -> MemoryTransport:
        transport = self.network.transport(key.peer, run=RUN, can_be_dialled=dialable)
        return await self._exits.enter_async_context(transport)

    def record(
        self,
        key: SigningKey,
        *,
        run: bytes = RUN,
        issued_at: float | None = None,
        is_proved: bool = True,
        addresses: tuple[str, ...] | None = None,
    ) -> PeerRecord:
        addresses = addresses or self.network.transport(key.peer, run=RUN).listen_addresses()
        issued = now() if issued_at is None else issued_at
        return sign_record(
            key, run=sha256(run) if run != RUN else RUN, addresses=addresses, can_be_dialled=is_proved,
            role=PeerRole.TRAINER, issued_at=issued,
        )  # fmt: skip

    async def keeper(
        self,
        key: SigningKey,
        *,
        dialable: bool = True,
        known: Sequence[SigningKey] = (),
        runs: bool = True,
        wanted: Callable[[Collection[PeerId]], frozenset[PeerId] | None] = lambda announced: None,
        is_stranger: Callable[[PeerId], bool] = lambda peer: False,
    ) -> LinkKeeper:
        transport = await self.transport(key, dialable=dialable)
        dial = transport.dial

        async def noted_dial(peer: PeerId, addresses: Sequence[str], deadline: float) -> None:
            self.dials.append((now(), peer))
            await dial(peer, addresses, deadline)

        transport.dial = noted_dial  # type: ignore[method-assign]
        keeper = LinkKeeper(
            transport=transport,
            directory=self.directory,
            record=lambda: self.record(key),
            known={other.peer: self.network.transport(other.peer, run=RUN).listen_addresses() for other in known},
            unix_seconds=now,
            report=lambda topic, text: self.heard.append((topic, text)),
            wanted=wanted,
            is_stranger=is_stranger,
        )
        if runs:
            self._tasks.append(asyncio.ensure_future(keeper.run()))
            self._exits.push_async_callback(self._end, self._tasks[-1])
        return keeper

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})

    def linked(self, key: SigningKey) -> frozenset[PeerId]:
        transport = self.network.find(key.peer)
        return transport.linked_peers() if transport is not None else frozenset()


def play(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with AsyncExitStack() as exits:
            await act(Scene(exits))

    run_virtual(whole())
