"""A stage for tests of transports: listeners that record, peers that can be stopped, and resources to close."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.transport.byte_stream import WRITE_BUFFER_BYTES
from p2p_diloco.transport.link import Lane, Transport, TransportLimits

RUN = sha256(b"the run")
OTHER_RUN = sha256(b"another run")


class FakeStream(asyncio.StreamReader):
    """A `ByteStream` whose other end is the test: it feeds bytes, and reads what is written at a set rate.

    Args:
        reads: returns the bytes that the other end reads in a second.
        error: raised by every write.
    """

    bytes_received = 0

    def __init__(self, reads: Callable[[], float] = lambda: math.inf, error: OSError | None = None) -> None:
        super().__init__()
        self.writes: list[tuple[float, int]] = []
        self.written = bytearray()
        self.unsent = 0.0
        self.ends: list[str] = []
        self._reads, self.error = reads, error

    async def peek(self, n: int) -> bytes:
        while len(self._buffer) < n and not self._eof:  # type: ignore[attr-defined]
            await self._wait_for_data("peek")  # type: ignore[attr-defined]
        return bytes(self._buffer[:n])  # type: ignore[attr-defined]

    def limit_buffer(self) -> None:
        """Do nothing: `drain` keeps to the limit anyway."""

    def unsent_bytes(self) -> int:
        return int(self.unsent)

    def has_room(self) -> bool:
        return False

    def write(self, chunk: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.writes.append((in_seconds(0), len(chunk)))
        self.written += chunk
        self.unsent = self.unsent + len(chunk) if self._reads() != math.inf else self.unsent

    async def drain(self) -> None:
        while self.unsent > WRITE_BUFFER_BYTES:
            await asyncio.sleep(1.0)
            self.unsent = max(self.unsent - self._reads(), 0.0)

    def write_eof(self) -> None:
        self.ends.append("eof")

    def abort(self) -> None:
        self.ends.append("abort")


class Recorder:
    """A listener that records, and lets a test wait for what it receives."""

    def __init__(self) -> None:
        self.frames: list[tuple[PeerId, Lane, bytes]] = []
        self.links: list[tuple[str, PeerId, str]] = []
        self.nuisances: list[tuple[PeerId, str]] = []
        self.ends: list[NetworkError] = []
        self.echo: Transport | None = None
        self.refuse: Exception | None = None
        self._news = asyncio.Event()

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
        self.frames.append((peer, lane, frame))
        self._news.set()
        if self.refuse is not None:
            raise self.refuse
        if self.echo is not None:
            self.echo.post(peer, frame, lane=lane, deadline=in_seconds(10))

    def link_up(self, peer: PeerId) -> None:
        self.links.append(("up", peer, ""))
        self._news.set()

    def link_lost(self, peer: PeerId, reason: str) -> None:
        self.links.append(("lost", peer, reason))
        self._news.set()

    def disturbed(self, peer: PeerId, text: str) -> None:
        self.nuisances.append((peer, text))
        self._news.set()

    def transport_lost(self, error: NetworkError) -> None:
        self.ends.append(error)
        self._news.set()

    async def wait_until(self, condition: Callable[[Recorder], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    def lost(self) -> list[str]:
        return [reason for kind, _, reason in self.links if kind == "lost"]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.links]

    def payloads(self, lane: Lane) -> list[bytes]:
        return [frame for _, its_lane, frame in self.frames if its_lane is lane]


@dataclass
class Remote:
    """A peer that sends every frame back, and that can be stopped and killed."""

    peer: PeerId
    addresses: tuple[str, ...]
    stop: Callable[[], None]
    go_on: Callable[[], None]
    kill: Callable[[], None]


@dataclass
class Stage(ABC):
    """The transports of one test."""

    exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    @abstractmethod
    def make(
        self, *, run: Digest = RUN, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> Transport:
        """Return a fresh transport of a new peer."""

    @abstractmethod
    async def add_remote(self) -> Remote:
        """Start a peer that echoes."""

    @abstractmethod
    def vacant_address(self, peer: PeerId) -> str:
        """Return an address at which nobody listens."""

    async def add(
        self, *, run: Digest = RUN, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> tuple[Transport, Recorder]:
        transport = self.make(run=run, can_be_dialled=can_be_dialled, limits=limits)
        recorder = Recorder()
        transport.serve(recorder)
        await self.exits.enter_async_context(transport)
        return transport, recorder


def in_seconds(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def link(dialler: Transport, acceptor: Transport, heard: Recorder) -> None:
    await dialler.dial(acceptor.peer, acceptor.listen_addresses(), in_seconds(10))
    await heard.wait_until(lambda it: it.kinds()[-1:] == ["up"])


async def act(stage: Stage, scene: Callable[[Any], Awaitable[None]]) -> None:
    """Run `scene` and close everything that it opened."""
    async with stage.exits:
        await scene(stage)
