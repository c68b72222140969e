"""An in-process network with delays, losses, cuts and stalls, on the loop's clock and from one seed.

It is made for a `VirtualTimeLoop`, where a thousand peers exchange frames in almost no real time; on any other loop it
runs in real time. The model: each lane of a link, in each direction, is a queue of frames to be written, then a pipe of
`pipe_bytes` (the kernel and daemon buffers), emptied in order by the receiver. If a receiver stops, the pipe fills, the
next write stalls, and the frame's deadline closes the link, as over libp2p.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self, TypedDict, Unpack

from p2p_diloco.errors import ConfigError, NotInRun, PeerError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, short_peer_id
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Frame, Lane, Transport, TransportLimits, frame_too_long, whole
from p2p_diloco.transport.outbox import Outbox, PostedFrame
from p2p_diloco.transport.pace import book_frame
from p2p_diloco.transport.weather import Weather


class WeatherSettings(TypedDict, total=False):
    """The arguments of `Weather` besides its seed."""

    delay_seconds: tuple[float, float]
    loss: float
    bytes_per_second: float
    pipe_bytes: int
    detect_seconds: float


class _InPipe(NamedTuple):
    arrival: float
    frame: bytes


class _Channel:
    """One lane of a link in one direction."""

    __slots__ = (
        "busy_until", "lane", "last_arrival", "link", "outbox", "pipe", "pipe_bytes", "receiver", "sender", "stuck",
        "writing",
    )  # fmt: skip

    def __init__(self, link: _Link, sender: MemoryTransport, receiver: MemoryTransport, lane: Lane) -> None:
        self.link, self.sender, self.receiver, self.lane = link, sender, receiver, lane
        self.outbox = Outbox(sender.limits.queue_bytes(lane), sender.counters.lane(lane))
        self.pipe: deque[_InPipe] = deque()
        self.pipe_bytes = 0
        self.last_arrival = 0.0
        self.busy_until = 0.0
        self.writing: PostedFrame | None = None
        self.stuck: PostedFrame | None = None

    def has_waiting_frames(self) -> bool:
        """Return whether closing now would lose frames."""
        return self.link.open[self.sender.peer] and (self.writing is not None or len(self.outbox) > 0)


class _Link:
    """Two peers and their four channels; each end notices separately that the link is gone."""

    __slots__ = ("channels", "ends", "open")

    def __init__(self, dialler: MemoryTransport, acceptor: MemoryTransport) -> None:
        self.ends = (dialler, acceptor)
        self.open = {dialler.peer: True, acceptor.peer: True}
        self.channels = {
            (sender.peer, lane): _Channel(self, sender, receiver, lane)
            for sender, receiver in ((dialler, acceptor), (acceptor, dialler))
            for lane in Lane
        }

    def other(self, end: MemoryTransport) -> MemoryTransport:
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class MemoryNetwork(Weather):
    """Connects memory transports. `MemoryNetwork(seed, delay_seconds=…, loss=…)`; see `Weather` for all arguments."""

    def __init__(self, seed: int = 0, **weather: Unpack[WeatherSettings]) -> None:
        super().__init__(seed, **weather)
        self._alive: dict[PeerId, MemoryTransport] = {}

    def transport(
        self, peer: PeerId, *, run: Digest, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> MemoryTransport:
        """Return a new transport of `peer` on this network; enter it to go online. A killed peer may return."""
        return MemoryTransport(self, peer=peer, run=run, can_be_dialled=can_be_dialled, limits=limits)

    def cut(self, one: PeerId, other: PeerId) -> None:
        super().cut(one, other)
        self._notice_cuts()

    def split(self, group: Iterable[PeerId], rest: Iterable[PeerId]) -> None:
        super().split(group, rest)
        self._notice_cuts()

    def isolate(self, peer: PeerId) -> None:
        super().isolate(peer)
        self._notice_cuts()

    def heal(self, one: PeerId | None = None, other: PeerId | None = None) -> None:
        super().heal(one, other)
        self._resume()

    def wake(self, peer: PeerId) -> None:
        super().wake(peer)
        transport = self._alive.get(peer)
        if transport is not None:
            transport.replay_missed_events()
        self._resume()

    def kill(self, peer: PeerId) -> None:
        """End `peer` as kill -9 does: its listener is not called any more, and the others lose their links to it."""
        transport = self._alive.get(peer)
        if transport is not None:
            transport.end(f"{short_peer_id(peer)} closed the connection")

    def is_on_line(self, transport: MemoryTransport) -> bool:
        """Return whether `transport` is online."""
        return self._alive.get(transport.peer) is transport

    def find(self, peer: PeerId) -> MemoryTransport | None:
        """Return the online transport of `peer`, or None."""
        return self._alive.get(peer)

    def enlist(self, transport: MemoryTransport) -> None:
        """Bring `transport` online."""
        if transport.peer in self._alive:
            raise ConfigError(f"peer {short_peer_id(transport.peer)} is already online; stop the other one first")
        self._alive[transport.peer] = transport

    def strike(self, transport: MemoryTransport) -> None:
        """Take `transport` offline."""
        if self._alive.get(transport.peer) is transport:
            del self._alive[transport.peer]

    def _resume(self) -> None:
        for transport in self._alive.values():
            transport.resume_links()

    def _notice_cuts(self) -> None:
        for transport in self._alive.values():
            transport.notice_cuts()


class MemoryTransport(Transport):
    """A `Transport` on a `MemoryNetwork`; created by `MemoryNetwork.transport`."""

    def __init__(
        self, network: MemoryNetwork, *, peer: PeerId, run: Digest, can_be_dialled: bool, limits: TransportLimits | None
    ) -> None:
        super().__init__(peer=peer, run=run, limits=limits)
        self._network = network
        self._can_be_dialled = can_be_dialled
        self._links: dict[PeerId, _Link] = {}
        self._missed: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._went_idle = asyncio.Event()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which this transport was entered."""
        assert self._loop is not None, "enter the transport first"
        return self._loop

    async def __aenter__(self) -> Self:
        self._network.enlist(self)
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waiting = [channel for link in self._links.values() for channel in self._own_channels(link)]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger_seconds):
                while any(channel.has_waiting_frames() for channel in waiting):
                    self._went_idle.clear()
                    await self._went_idle.wait()
        self.end(f"{short_peer_id(self.peer)} closed the connection")

    def listen_addresses(self) -> tuple[str, ...]:
        return (f"/memory/1/p2p/{format_peer_id(self.peer)}",) if self._can_be_dialled else ()

    def listen_ports(self) -> tuple[int, ...]:
        return (1,) if self._can_be_dialled else ()

    def linked_peers(self) -> frozenset[PeerId]:
        return frozenset(self._links)

    def can_be_dialled(self) -> bool:
        """Return whether this peer listens."""
        return self._can_be_dialled

    async def dial(self, peer: PeerId, addresses: Sequence[str], deadline: float) -> None:
        if peer in self._links:
            return
        name = short_peer_id(peer)
        if peer == self.peer:
            raise PeerError(f"{name} is this peer itself; dial others")
        if not any(address.endswith(f"/p2p/{format_peer_id(peer)}") for address in addresses):
            raise PeerError(f"{name} cannot be dialled: none of its {len(addresses)} addresses ends in its id")
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(self._network.draw_delay_seconds() + self._network.draw_delay_seconds())
                while self._network.is_blocked(self.peer, peer):
                    await self._network.wait_for_change()
        except TimeoutError:
            raise PeerError(f"{name} cannot be dialled: no answer by the deadline at {addresses[0]}") from None
        self._establish(peer, addresses[0])

    async def remote_hosts(self) -> dict[PeerId, tuple[str, ...]]:
        return dict.fromkeys(self._links, ("127.0.0.1",))

    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(self._network.draw_delay_seconds() + self._network.draw_delay_seconds())
                while self._network.is_blocked(self.peer, peer):
                    await self._network.wait_for_change()
        except TimeoutError:
            raise PeerError(f"{host}:{port} timed out") from None
        target = self._network.find(peer)
        if target is None or not target.can_be_dialled():
            raise PeerError(f"{host}:{port} refused")

    def post(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        self._check_frame(frame, lane)
        link = self._links.get(peer)
        if link is None:
            return False
        channel = link.channels[self.peer, lane]
        if not channel.outbox.offer(frame, deadline):
            return False
        self._pump(channel)
        return True

    def waiting_bytes(self, peer: PeerId, lane: Lane) -> int:
        return self._links[peer].channels[self.peer, lane].outbox.waiting_bytes if peer in self._links else 0

    def hang_up(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._close(link, "this peer hung up", f"{short_peer_id(self.peer)} hung up")

    def end(self, reason: str) -> None:
        """Go offline without calling the own listener; frames in the pipes arrive, then others get `reason`."""
        self._network.strike(self)
        self._missed.clear()
        for link in tuple(self._links.values()):
            self._drop_end(link)
            self._tell_other_end(link, reason)
        self._can_be_dialled = False

    def replay_missed_events(self) -> None:
        """Deliver the events that happened while this peer was stopped."""
        missed, self._missed = self._missed, []
        for event in missed:
            event()

    def resume_links(self) -> None:
        """Resume writing and delivering after a heal or a wake."""
        for link in tuple(self._links.values()):
            for channel in link.channels.values():
                self.loop.call_soon(_deliver_due, channel)
                self.loop.call_soon(self._pump, channel)

    def notice_cuts(self) -> None:
        """Lose the links that are cut now, unless they are healed within the detection time."""
        for peer, link in self._links.items():
            if self._network.is_cut(self.peer, peer):
                self.loop.call_later(self._network.detect_seconds, self._give_up_if_cut, peer, link)

    def lose(self, link: _Link, reason: str) -> None:
        """Handle the loss of `link`; delayed if this peer is stopped."""
        if not link.open[self.peer]:
            return
        if self._network.is_stalled(self.peer):
            self._missed.append(lambda: self.lose(link, reason))
            return
        self._drop_end(link)
        if self._network.is_on_line(self):
            self._tell(self.listener.link_lost, link.other(self).peer, reason)

    def accept(self, link: _Link) -> None:
        """Accept a new link; first lose a half-open one to the same peer, whose other end is already closed."""
        peer = link.other(self).peer
        stale = self._links.get(peer)
        if stale is not None:
            self._drop_end(stale)
            self._tell(self.listener.link_lost, peer, f"{short_peer_id(peer)} opened a new link")
        self._links[peer] = link
        self._tell(self.listener.link_up, peer)

    def _establish(self, peer: PeerId, address: str) -> None:
        if peer in self._links:
            return
        name = short_peer_id(peer)
        target = self._network.find(peer)
        if target is None or not target.can_be_dialled():
            raise PeerError(f"{name} cannot be dialled: {address} refused the connection")
        if target.run != self.run:
            raise NotInRun(f"{name} at {address} is not in run {self.run.hex()[:16]}")
        if not self._network.is_on_line(self):
            raise PeerError(f"{name} cannot be dialled: this peer is offline")
        if not target.is_welcome(self.peer):
            raise PeerError(f"{name} at {address} refused the link: it does not want one")
        if len(target.linked_peers()) >= target.limits.links and not target.is_needed(self.peer):
            raise PeerError(f"{name} at {address} refused the link: it already has {target.limits.links}")
        link = _Link(self, target)
        target.accept(link)
        self.accept(link)

    def _pump(self, channel: _Channel) -> None:
        """Move frames from the queue to the pipe while there is room."""
        network = self._network
        sender, receiver = channel.sender, channel.receiver
        if network.is_stalled(sender.peer):
            return
        while channel.link.open[sender.peer]:
            if channel.writing is None:
                channel.writing = channel.outbox.take(self.loop.time())
                if channel.writing is None:
                    sender._went_idle.set()
                    return
            frame, deadline = channel.writing
            if channel.pipe and channel.pipe_bytes + len(frame) > network.pipe_bytes:
                if channel.stuck is not channel.writing:
                    channel.stuck = channel.writing
                    self.loop.call_at(deadline, self._give_up_if_stuck, channel, channel.writing)
                return
            channel.writing = None
            counters = sender.counters.lane(channel.lane)
            counters.frames_sent += 1
            counters.bytes_sent += len(frame) + FRAME_PREFIX_BYTES
            if network.draw_loss():
                continue
            earliest = max(channel.busy_until, self.loop.time())
            shared = channel.lane is Lane.BULK
            channel.busy_until = network.book_line(sender.peer, receiver.peer, len(frame), earliest, shared=shared)
            allowed = book_frame((sender.upload, receiver.download), len(frame) + FRAME_PREFIX_BYTES)
            if shared:
                channel.busy_until = max(channel.busy_until, allowed)
            channel.last_arrival = max(channel.last_arrival, channel.busy_until + network.draw_delay_seconds())
            channel.pipe.append(_InPipe(channel.last_arrival, whole(frame)))
            channel.pipe_bytes += len(frame)
            receiver.loop.call_at(channel.last_arrival, _deliver_due, channel)

    def take_frame(self, channel: _Channel, frame: bytes) -> None:
        """Receive one frame, unless it is too long."""
        sender = channel.sender.peer
        longest = self.limits.frame_bytes(channel.lane)
        if len(frame) > longest:
            text = frame_too_long(sender, channel.lane, len(frame), longest)
            self._close(channel.link, text, f"{short_peer_id(self.peer)} closed the connection")
            return
        objection = self._hand_over(sender, channel.lane, frame)
        if objection is not None:
            self._close(channel.link, objection, f"{short_peer_id(self.peer)} closed the connection")
        if channel.has_waiting_frames():
            channel.sender._pump(channel)

    def _close(self, link: _Link, own_reason: str, their_reason: str) -> None:
        self.lose(link, own_reason)
        self._tell_other_end(link, their_reason)

    def _tell_other_end(self, link: _Link, reason: str) -> None:
        """Notify the other end of the loss after all written frames have arrived; a cut delays this."""
        other = link.other(self)
        arrivals = [link.channels[self.peer, lane].last_arrival for lane in Lane]
        self.loop.call_at(
            max(self.loop.time() + self._network.draw_delay_seconds(), *arrivals),
            self._report_to_other,
            link,
            other,
            reason,
        )

    def _report_to_other(self, link: _Link, other: MemoryTransport, reason: str) -> None:
        if self._network.is_cut(self.peer, other.peer):
            self.loop.call_later(self._network.detect_seconds, other.lose, link, "no answer over a cut link")
        else:
            other.lose(link, reason)

    def _own_channels(self, link: _Link) -> list[_Channel]:
        return [link.channels[self.peer, lane] for lane in Lane]

    def _drop_end(self, link: _Link) -> None:
        link.open[self.peer] = False
        for lane in Lane:
            link.channels[self.peer, lane].outbox.clear()
        peer = link.other(self).peer
        if self._links.get(peer) is link:
            del self._links[peer]

    def _give_up_if_stuck(self, channel: _Channel, writing: PostedFrame) -> None:
        if channel.writing is not writing or not channel.link.open[self.peer]:
            return
        if self._network.is_stalled(self.peer):
            channel.stuck = None  # after waking, the next write attempt sets the timer again
        else:
            text = f"{short_peer_id(channel.receiver.peer)} did not read a {channel.lane.value} frame by its deadline"
            self._close(channel.link, text, f"{short_peer_id(self.peer)} closed the connection")

    def _give_up_if_cut(self, peer: PeerId, link: _Link) -> None:
        if self._network.is_cut(self.peer, peer):
            self.lose(link, f"no answer for {self._network.detect_seconds:.1f} s")


def _deliver_due(channel: _Channel) -> None:
    """Deliver the frames of the pipe that have arrived, in order, unless the path is blocked."""
    receiver = channel.receiver
    now = receiver.loop.time() + 1e-6
    while channel.pipe and channel.pipe[0].arrival <= now and channel.link.open[receiver.peer]:
        if receiver._network.is_blocked(channel.sender.peer, receiver.peer):
            return
        frame = channel.pipe.popleft().frame
        channel.pipe_bytes -= len(frame)
        receiver.take_frame(channel, frame)
