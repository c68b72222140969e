"""The simulated network: the faulty network with real reachability, one-way failures and slow frames.

A transport reports what its peer believes about its own reachability (`listen_addresses`). Whether a dial gets through
is decided here, by the places of the machines.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import Digest, PeerId, sha256, short_peer_id
from p2p_diloco.node import node as node_module
from p2p_diloco.protocol.wire.messages import Message, decode_message, encode_message
from p2p_diloco.testing.network import MemoryTransport
from p2p_diloco.transport.link import Frame, Lane, SplitFrame, TransportLimits, whole
from simulator.faulty_network import FaultyNetwork, FaultyTransport
from simulator.process import OUTSIDE, Process, SimulationLoop

OPEN = "open"
"""Any peer can dial this machine."""
OUTBOUND_ONLY = "outbound"
"""Behind a router that accepts no inbound connections."""

MOST_VALUES = 4096

Mutator = Callable[[PeerId, Message], Sequence[Message | bytes]]
"""Returns the messages or frames that a hostile member sends to a peer in place of a message."""
Tap = Callable[[PeerId, PeerId, Lane, bytes], None]


@dataclass(slots=True)
class Ways:
    """Faults that affect all links.

    Attributes:
        loss: share of frames that are lost, each independently.
        slow_share, slow_seconds: share of frames that take longer, and by how much at most; later frames on their lane
            wait.
        lag_seconds: maximum extra latency. Each lane of each link, in each direction, has its own constant one, so that
            lanes overtake each other.
    """

    loss: float = 0.0
    slow_share: float = 0.0
    slow_seconds: float = 0.0
    lag_seconds: float = 0.0


@dataclass(slots=True)
class SentFrames:
    """Totals of the frames of one kind that were posted over links.

    Attributes:
        sample: the first frame, to identify the kind.
    """

    sample: Frame
    count: int = 0
    num_bytes: int = 0


class _TrueTime:
    """The loop as the network sees it: true time, outside of all processes."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return self._loop.true_seconds()

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_at(when, callback, *args, context=OUTSIDE)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_at(self._loop.true_seconds() + delay, callback, *args, context=OUTSIDE)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self._loop.call_soon(callback, *args, context=OUTSIDE)


class SimulatedNetwork(FaultyNetwork):
    """All links between the machines of a simulation. Create it inside a `SimulationLoop`."""

    def __init__(self, seed: int, *, delay_seconds: tuple[float, float]) -> None:
        super().__init__(seed, delay_seconds=delay_seconds)
        self.trouble = Ways()
        self.muted: frozenset[tuple[PeerId, PeerId]] = frozenset()
        """(sender, receiver) pairs whose frames are lost."""
        self.places: dict[PeerId, str] = {}
        """`OPEN`, `OUTBOUND_ONLY`, or the name of a home network whose members can be dialled only by each other."""
        self.lans: dict[PeerId, str] = {}
        """The home network of each machine that is in one, whether or not its router forwards a port to it."""
        self.tap: Tap | None = None
        self.sent: dict[int, SentFrames] | None = None
        """Totals of sent frames by message kind number; None: nothing is counted."""
        self.log_normal: tuple[float, float] | None = None
        """Median and sigma of log-normal one-way delays, as on the internet; None: delays are uniform."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        self.true_time = _TrueTime(loop)
        self._copies: set[MemoryTransport] = set()
        self._slow = random.Random(f"slow frames of {seed}")
        self._lag = 0.0

    def simulated_transport(
        self,
        peer: PeerId,
        *,
        run: Digest,
        believes_open: bool,
        process: Process,
        limits: TransportLimits | None = None,
        host: int = 1,
    ) -> SimulatedTransport:
        """Return the transport of a process.

        With a `host` above 1 it can be online beside another transport of the same peer.
        """
        return SimulatedTransport(
            self, peer=peer, run=run, believes_open=believes_open, process=process, limits=limits, host=host
        )

    def enlist(self, transport: MemoryTransport) -> None:
        if isinstance(transport, SimulatedTransport) and transport.host > 1:
            self._copies.add(transport)
        else:
            super().enlist(transport)

    def strike(self, transport: MemoryTransport) -> None:
        self._copies.discard(transport)
        super().strike(transport)

    def is_on_line(self, transport: MemoryTransport) -> bool:
        return transport in self._copies or super().is_on_line(transport)

    def can_dial(self, dialler: PeerId, target: PeerId) -> bool:
        """Return whether a connection that `dialler` opens gets through to `target`."""
        there = self.places.get(target, OPEN)
        at_home = self.places.get(dialler) == there or self.lans.get(dialler) == there
        return there == OPEN or (there != OUTBOUND_ONLY and at_home)

    def host_seen(self, viewer: PeerId, peer: PeerId) -> str:
        """Return the IP address at which `viewer` sees `peer`: a private one only within a home network."""
        lan, number = self.lans.get(peer), f"{peer[0]}.{peer[1]}"
        return f"192.168.{number}" if lan is not None and lan == self.lans.get(viewer) else f"45.10.{number}"

    def mute(self, senders: Iterable[PeerId], receivers: Iterable[PeerId]) -> None:
        """Lose the frames from `senders` to `receivers`, and no others."""
        others = tuple(receivers)
        self.muted = frozenset((sender, receiver) for sender in senders for receiver in others)

    def book_line(
        self, sender: PeerId, receiver: PeerId, num_bytes: int, earliest: float, *, shared: bool = True
    ) -> float:
        if self.trouble.lag_seconds:
            draw = sha256(sender, receiver, b"bulk" if shared else b"control")
            self._lag = self.trouble.lag_seconds * draw[0] / 256.0
        return super().book_line(sender, receiver, num_bytes, earliest, shared=shared)

    def draw_delay_seconds(self) -> float:
        """Draw a frame's delay, with the lag that `book_line` has set for its lane."""
        if self.log_normal is None:
            delay = super().draw_delay_seconds()
        else:
            median, sigma = self.log_normal
            delay = median * self._random.lognormvariate(0.0, sigma)
        delay, trouble = delay + self._lag, self.trouble
        self._lag = 0.0
        if trouble.slow_share and self._slow.random() < trouble.slow_share:
            delay += trouble.slow_seconds * self._slow.random()
        return delay

    def draw_loss(self) -> bool:
        return self.trouble.loss > 0.0 and self._slow.random() < self.trouble.loss


class SimulatedTransport(FaultyTransport):
    """The transport of one process: its callbacks run in the process, its links run on true time."""

    def __init__(
        self,
        network: SimulatedNetwork,
        *,
        peer: PeerId,
        run: Digest,
        believes_open: bool,
        process: Process,
        limits: TransportLimits | None,
        host: int = 1,
    ) -> None:
        super().__init__(network, peer=peer, run=run, can_be_dialled=believes_open, limits=limits)
        self.process = process
        self.host = host
        self.mutator: Mutator | None = None
        self._net = network

    @property
    def loop(self) -> Any:
        return self._net.true_time

    def listen_addresses(self) -> tuple[str, ...]:
        return tuple(address.replace("/memory/1/", f"/memory/{self.host}/") for address in super().listen_addresses())

    def post(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        """Queue a frame; it is lost if the receiver cannot hear this peer."""
        true = self.process.clock.true_at(deadline, self.loop.time())
        if self._net.sent is not None and peer in self.linked_peers():
            kind = (frame.head if isinstance(frame, SplitFrame) else frame)[1]
            sent = self._net.sent.setdefault(kind, SentFrames(frame))
            sent.count += 1
            sent.num_bytes += len(frame)
        if (self.peer, peer) in self._net.muted:
            return peer in self.linked_peers()
        if self.mutator is None:
            return super().post(peer, frame, lane=lane, deadline=true)
        try:
            message = decode_message(whole(frame))
        except FrameError:
            return super().post(peer, frame, lane=lane, deadline=true)
        told = self.mutator(peer, message)
        frames = [each if isinstance(each, bytes) else encode_message(each) for each in told]
        posted = [self.post_unchanged(peer, each, lane=lane, deadline=true) for each in frames]
        return all(posted)

    def post_unchanged(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        """Queue a frame unchanged; `deadline` is in true seconds."""
        return super().post(peer, frame, lane=lane, deadline=deadline)

    def accept(self, link: Any) -> None:
        """Accept a new link.

        If two machines of one peer are online, the other one is notified that it has lost its link.
        """
        stale = self._links.get(link.other(self).peer)
        super().accept(link)
        if stale is None or stale.other(self) is link.other(self):
            return
        if self._net.is_on_line(stale.other(self)):
            self._notify_other_end(stale, f"{short_peer_id(self.peer)} closed the connection")

    def _establish(self, peer: PeerId, address: str) -> None:
        if not self._net.can_dial(self.peer, peer):
            raise PeerError(f"{short_peer_id(peer)} cannot be dialled: {address} does not answer")
        super()._establish(peer, address)

    def _notify(self, callback: Callable[..., None], *arguments: object) -> None:
        self.process.context.copy().run(super()._notify, callback, *arguments)

    def _judge(self, sender: PeerId, lane: Lane, head: bytes, length: int) -> bool:
        return self.process.context.copy().run(super()._judge, sender, lane, head, length)

    def _hand_over(self, sender: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> str | None:
        if self._net.tap is not None:
            self._net.tap(sender, self.peer, lane, bytes(frame))
        return self.process.context.copy().run(super()._hand_over, sender, lane, frame)


@contextmanager
def shared_values() -> Iterator[None]:
    """Decode each frame only once for all nodes that receive it, inside the block.

    Messages are frozen, so nodes cannot notice that they share them.
    """
    values: dict[bytes, Message] = {}
    original = decode_message

    def decode_once(frame: bytes | bytearray | memoryview) -> Message:
        if not isinstance(frame, bytes):
            return original(frame)
        found = values.get(frame)
        if found is None:
            if len(values) >= MOST_VALUES:
                values.clear()
            found = values[frame] = original(frame)
        return found

    shell: Any = node_module
    shell.decode_message = decode_once
    try:
        yield
    finally:
        shell.decode_message = original
