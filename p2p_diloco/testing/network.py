"""An in-process network, and a directory of its peers: frames arrive at once and in order, on the running loop.

The model: each lane of a link, in each direction, is a queue of frames to be written, then a pipe of `PIPE_BYTES` (the
kernel and daemon buffers), emptied in order by the receiver. Caps on upload and download hold. If a receiver reads
nothing, the pipe fills, the next write stalls, and the frame's deadline closes the link, as over libp2p.

`simulator/faulty_network.py` overrides single methods of `MemoryTransport` to add delays, losses, cuts and stalls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from p2p_diloco.errors import ConfigError, FrameError, NotInRun, PeerError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, short_peer_id
from p2p_diloco.transport.directory import Directory, PeerRecord, decode_record
from p2p_diloco.transport.link import (
    FRAME_PREFIX_BYTES,
    HEAD_BYTES,
    MIB,
    Frame,
    Lane,
    Transport,
    TransportLimits,
    frame_too_long,
    whole,
)
from p2p_diloco.transport.outbox import Outbox, PostedFrame

PIPE_BYTES = MIB
"""Bytes that a lane accepts without being read."""


class _InPipe(NamedTuple):
    arrival: float
    frame: bytes


class Channel:
    """One lane of a link in one direction: a queue, the frame that is being written, and a pipe.

    Attributes:
        busy_until: time at which the last frame has left.
        last_arrival: time at which all frames in the pipe have arrived.
    """

    __slots__ = (
        "_stuck", "busy_until", "lane", "last_arrival", "link", "outbox", "pipe", "pipe_bytes", "receiver", "sender",
        "writing",
    )  # fmt: skip

    def __init__(self, link: MemoryLink, sender: MemoryTransport, receiver: MemoryTransport, lane: Lane) -> None:
        self.link, self.sender, self.receiver, self.lane = link, sender, receiver, lane
        self.outbox = Outbox(sender.limits.queue_bytes(lane), sender.counters.lane(lane))
        self.pipe: deque[_InPipe] = deque()
        self.pipe_bytes = 0
        self.last_arrival = 0.0
        self.busy_until = 0.0
        self.writing: PostedFrame | None = None
        self._stuck: PostedFrame | None = None

    def begin_write(self, now: float) -> PostedFrame | None:
        """Return the frame that is being written: the next one of the queue if there was none; None if it is empty."""
        if self.writing is None:
            self.writing = self.outbox.take(now)
        return self.writing

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the pipe has room for a frame; an empty one takes any frame."""
        return not self.pipe or self.pipe_bytes + num_bytes <= PIPE_BYTES

    def note_stuck(self) -> bool:
        """Note that the frame that is being written has no room; return whether this is new."""
        is_new = self._stuck is not self.writing
        self._stuck = self.writing
        return is_new

    def forget_stuck(self, frame: PostedFrame) -> None:
        """Have `note_stuck` return True again for this frame."""
        if self._stuck is frame:
            self._stuck = None

    def end_write(self) -> None:
        """Count the frame that is being written as sent."""
        assert self.writing is not None, "begun before"
        num_bytes = len(self.writing.frame) + FRAME_PREFIX_BYTES
        self.sender.counters.lane(self.lane).count_sent(num_bytes, num_frames=1)
        self.writing = None

    def occupy(self, until: float) -> float:
        """Have the next frame wait until this time; return it."""
        self.busy_until = until
        return until

    def enter_pipe(self, frame: bytes, arrival: float) -> float:
        """Put a frame into the pipe, which it leaves after the frames before it; return when it arrives."""
        self.last_arrival = max(self.last_arrival, arrival)
        self.pipe.append(_InPipe(self.last_arrival, frame))
        self.pipe_bytes += len(frame)
        return self.last_arrival

    def leave_pipe(self) -> bytes:
        """Take the first frame out of the pipe."""
        frame = self.pipe.popleft().frame
        self.pipe_bytes -= len(frame)
        return frame

    def has_waiting_frames(self) -> bool:
        """Return whether closing now would lose frames."""
        return self.link.open[self.sender.peer] and (self.writing is not None or len(self.outbox) > 0)


class MemoryLink:
    """Two peers and their four channels; each end notices separately that the link is gone."""

    __slots__ = ("channels", "ends", "open")

    def __init__(self, dialler: MemoryTransport, acceptor: MemoryTransport) -> None:
        self.ends = (dialler, acceptor)
        self.open = {dialler.peer: True, acceptor.peer: True}
        self.channels = {
            (sender.peer, lane): Channel(self, sender, receiver, lane)
            for sender, receiver in ((dialler, acceptor), (acceptor, dialler))
            for lane in Lane
        }

    def other(self, end: MemoryTransport) -> MemoryTransport:
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class MemoryNetwork:
    """Connects memory transports."""

    def __init__(self) -> None:
        self._alive: dict[PeerId, MemoryTransport] = {}

    def transport(
        self, peer: PeerId, *, run: Digest, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> MemoryTransport:
        """Return a new transport of `peer` on this network; enter it to go online. A killed peer may return."""
        return MemoryTransport(self, peer=peer, run=run, can_be_dialled=can_be_dialled, limits=limits)

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


class MemoryTransport(Transport):
    """A `Transport` on a `MemoryNetwork`; created by `MemoryNetwork.transport`."""

    def __init__(
        self, network: MemoryNetwork, *, peer: PeerId, run: Digest, can_be_dialled: bool, limits: TransportLimits | None
    ) -> None:
        super().__init__(peer=peer, run=run, limits=limits)
        self._network = network
        self._can_be_dialled = can_be_dialled
        self._links: dict[PeerId, MemoryLink] = {}
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
                await self._round_trip(peer)
        except TimeoutError:
            raise PeerError(f"{name} cannot be dialled: no answer by the deadline at {addresses[0]}") from None
        self._establish(peer, addresses[0])

    async def remote_hosts(self) -> dict[PeerId, tuple[str, ...]]:
        return dict.fromkeys(self._links, ("127.0.0.1",))

    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._round_trip(peer)
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
        for link in tuple(self._links.values()):
            self._drop_end(link)
            self._notify_other_end(link, reason)
        self._can_be_dialled = False

    def lose(self, link: MemoryLink, reason: str) -> None:
        """Handle the loss of `link`."""
        if not link.open[self.peer]:
            return
        self._drop_end(link)
        if self._network.is_on_line(self):
            self._notify(self.listener.link_lost, link.other(self).peer, reason)

    def accept(self, link: MemoryLink) -> None:
        """Accept a new link; first lose a half-open one to the same peer, whose other end is already closed."""
        peer = link.other(self).peer
        stale = self._links.get(peer)
        if stale is not None:
            self._drop_end(stale)
            self._notify(self.listener.link_lost, peer, f"{short_peer_id(peer)} opened a new link")
        self._links[peer] = link
        self._notify(self.listener.link_up, peer)

    async def _round_trip(self, peer: PeerId) -> None:
        """Wait until an answer of `peer` could have arrived."""
        await asyncio.sleep(0)

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
        link = MemoryLink(self, target)
        target.accept(link)
        self.accept(link)

    def _pump(self, channel: Channel) -> None:
        """Move frames from the queue to the pipe while there is room."""
        sender, receiver = channel.sender, channel.receiver
        while channel.link.open[sender.peer]:
            writing = channel.begin_write(self.loop.time())
            if writing is None:
                sender._went_idle.set()
                return
            frame, deadline = writing
            if not channel.has_room(len(frame)):
                if channel.note_stuck():
                    self.loop.call_at(deadline, self._give_up_if_stuck, channel, writing)
                return
            channel.end_write()
            arrival = self._arrival(channel, len(frame), max(channel.busy_until, self.loop.time()))
            if arrival is not None:
                due = channel.enter_pipe(whole(frame), arrival)
                receiver.loop.call_at(due, receiver._deliver_due, channel)

    def _arrival(self, channel: Channel, num_bytes: int, earliest: float) -> float | None:
        """Book a frame that can be sent at `earliest`; return when it arrives, or None if it is lost."""
        caps = (channel.sender.upload, channel.receiver.download)
        allowed = max(cap.count(num_bytes + FRAME_PREFIX_BYTES) for cap in caps)
        return channel.occupy(max(earliest, allowed) if channel.lane is Lane.BULK else earliest)

    def _deliver_due(self, channel: Channel) -> None:
        """Deliver the frames of the pipe that have arrived, in order; those written meanwhile have their own turn."""
        now = self.loop.time() + 1e-6
        for _ in range(len(channel.pipe)):
            if channel.pipe[0].arrival > now or not self._can_read(channel):
                return
            self.take_frame(channel, channel.leave_pipe())

    def _can_read(self, channel: Channel) -> bool:
        """Return whether a frame that has arrived can be read now."""
        return channel.link.open[self.peer]

    def take_frame(self, channel: Channel, frame: bytes) -> None:
        """Receive one frame, unless it is too long."""
        sender = channel.sender.peer
        longest = self.limits.frame_bytes(channel.lane)
        if len(frame) > longest:
            text = frame_too_long(sender, channel.lane, len(frame), longest)
            self._close(channel.link, text, f"{short_peer_id(self.peer)} closed the connection")
            return
        try:
            is_read = self._judge(sender, channel.lane, frame[:HEAD_BYTES], len(frame))
            objection = self._hand_over(sender, channel.lane, frame) if is_read else None
            if not is_read:
                self.counters.lane(channel.lane).count_received(len(frame))
        except FrameError as error:
            objection = str(error)
        if objection is not None:
            self._close(channel.link, objection, f"{short_peer_id(self.peer)} closed the connection")
        if channel.has_waiting_frames():
            channel.sender._pump(channel)

    def _judge(self, sender: PeerId, lane: Lane, head: bytes, length: int) -> bool:
        return self.may_read(sender, lane, head, length)

    def _close(self, link: MemoryLink, own_reason: str, their_reason: str) -> None:
        self.lose(link, own_reason)
        self._notify_other_end(link, their_reason)

    def _notify_other_end(self, link: MemoryLink, reason: str, delay_seconds: float = 0.0) -> None:
        """Notify the other end of the loss after all written frames have arrived."""
        arrivals = [link.channels[self.peer, lane].last_arrival for lane in Lane]
        self.loop.call_at(max(self.loop.time() + delay_seconds, *arrivals), self._report_to_other, link, reason)

    def _report_to_other(self, link: MemoryLink, reason: str) -> None:
        link.other(self).lose(link, reason)

    def _own_channels(self, link: MemoryLink) -> list[Channel]:
        return [link.channels[self.peer, lane] for lane in Lane]

    def _drop_end(self, link: MemoryLink) -> None:
        link.open[self.peer] = False
        for lane in Lane:
            link.channels[self.peer, lane].outbox.clear()
        peer = link.other(self).peer
        if self._links.get(peer) is link:
            del self._links[peer]

    def _give_up_if_stuck(self, channel: Channel, writing: PostedFrame) -> None:
        if channel.writing is not writing or not channel.link.open[self.peer]:
            return
        text = f"{short_peer_id(channel.receiver.peer)} did not read a {channel.lane.value} frame by its deadline"
        self._close(channel.link, text, f"{short_peer_id(self.peer)} closed the connection")


class MemoryDirectory(Directory):
    """A directory for peers in one process. `now_seconds` returns the time; `is_down` makes every call fail."""

    def __init__(self, now_seconds: Callable[[], float]) -> None:
        self._now_seconds = now_seconds
        self._records: dict[PeerId, tuple[PeerRecord, float]] = {}
        self.is_down = False

    async def announce(self, record: PeerRecord, expires_at: float) -> None:
        self._raise_if_down()
        known = self._records.get(record.peer)
        if known is None or known[0].issued_at <= record.issued_at:
            self._records[record.peer] = (decode_record(record.encode()), expires_at)

    async def peers(self) -> tuple[PeerRecord, ...]:
        self._raise_if_down()
        now = self._now_seconds()
        self._records = {peer: kept for peer, kept in self._records.items() if kept[1] > now}
        return tuple(self._records[peer][0] for peer in sorted(self._records))

    def _raise_if_down(self) -> None:
        if self.is_down:
            raise PeerError("the directory does not answer")
