"""The one seam to the network: framed messages over authenticated links between peers.

A link joins two peers of one run, whichever of them dialled. It carries two lanes, each a stream of its own: small
control frames never wait behind vectors. Everything here is a hint to the sender: a frame that was posted may be
lost with its link, and only an answer says that it came. Behind this seam are `libp2p` and `memory`; one contract
test holds both to these words.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from p2p_diloco.errors import NetworkError, PeerError
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.transport.addresses import port_in
from p2p_diloco.transport.pace import Pace

KIB = 1024
MIB = 1024 * KIB
FRAME_PREFIX_BYTES = 4
"""Every frame travels behind its length as a big-endian u32."""


class Lane(enum.Enum):
    """One of the two streams of a link."""

    CONTROL = "control"
    BULK = "bulk"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is computed in Python


@dataclass(frozen=True, slots=True)
class SplitFrame:
    """A frame in two parts, that a long vector need not be copied behind what is said of it.

    Attributes:
        head: what comes first.
        vector: the rest; it must not change until it is sent.
    """

    head: bytes | bytearray
    vector: bytes | memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.vector)


Frame: TypeAlias = bytes | SplitFrame


def whole(frame: Frame) -> bytes:
    """Return a frame in one part."""
    return b"".join((frame.head, frame.vector)) if isinstance(frame, SplitFrame) else frame


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds that hold whatever a peer sends or fails to read.

    Attributes:
        control_frame_bytes: longest control frame, without its length prefix.
        bulk_frame_bytes: longest bulk frame, without its length prefix.
        control_queue_bytes: bytes that may wait to be written on one link's control lane.
        bulk_queue_bytes: the same for the bulk lane.
        frame_seconds: once a frame's length was read, the rest must come within this time, plus what its bytes take
            at `slowest_bytes_per_second`; and who writes one waits no longer than that after its deadline.
        slowest_bytes_per_second: the slowest line that can take part.
        control_bytes_per_second: a peer whose control frames come faster for long is read no faster.
        upload_bytes_per_second, download_bytes_per_second: caps on this peer's line, as its packets count; None: none.
            Bulk frames wait for them, control frames only count.
        linger_seconds: how long closing waits for frames that are still on their way out.
        links: number of peers linked at once; one more is turned away, unless the run needs it.
    """

    control_frame_bytes: int = 256 * KIB
    bulk_frame_bytes: int = 32 * MIB
    control_queue_bytes: int = 4 * MIB
    bulk_queue_bytes: int = 128 * MIB
    frame_seconds: float = 30.0
    slowest_bytes_per_second: float = 16.0 * KIB
    control_bytes_per_second: float = 1.0 * MIB
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    linger_seconds: float = 2.0
    links: int = 512

    def frame_bytes(self, lane: Lane) -> int:
        """Return the longest frame that `lane` takes."""
        return self.control_frame_bytes if lane is Lane.CONTROL else self.bulk_frame_bytes

    def queue_bytes(self, lane: Lane) -> int:
        """Return how many bytes may wait to be written on one link's `lane`."""
        return self.control_queue_bytes if lane is Lane.CONTROL else self.bulk_queue_bytes

    def longest_seconds(self, frame_bytes: int) -> float:
        """Return how long the other end may take over a frame."""
        return self.frame_seconds + frame_bytes / self.slowest_bytes_per_second


@dataclass(slots=True, kw_only=True)
class LaneCounters:
    """What went through one lane since the start, all links together; bytes include the length prefixes."""

    frames_sent: int = 0
    bytes_sent: int = 0
    bytes_read: int = 0
    """Of the bytes sent, what the other ends have read, as far as they said; of bulk frames only."""
    last_read_at: float = 0.0
    """Loop time in which they said so last."""
    frames_received: int = 0
    bytes_received: int = 0
    frames_dropped: int = 0
    """Frames whose deadline passed, or whose link was lost, before their write began."""
    bytes_waiting: int = 0
    """Of frames that were posted and are not written, without their prefixes."""


@dataclass(slots=True, kw_only=True)
class TransportCounters:
    """Traffic of one transport by lane."""

    control: LaneCounters = field(default_factory=LaneCounters)
    bulk: LaneCounters = field(default_factory=LaneCounters)

    def lane(self, lane: Lane) -> LaneCounters:
        """Return the counters of `lane`."""
        return self.control if lane is Lane.CONTROL else self.bulk


def frame_too_long(sender: PeerId, lane: Lane, frame_bytes: int, longest_bytes: int) -> str:
    """Say why a link was closed whose other end announced more than this peer takes."""
    name = short_peer_id(sender)
    return f"{name} announced a {lane.value} frame of {frame_bytes} bytes where 1 to {longest_bytes} are allowed"


class TransportListener(Protocol):
    """What a transport calls, in its own loop. Callbacks are synchronous, short, and may post, dial later, hang up."""

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Take one whole frame of an authenticated peer; frames of one lane and link come in order.

        Raising PeerError closes the link, with its text as the reason.
        """

    def link_up(self, peer: PeerId) -> None:
        """Hear that frames to `peer` can be posted from now on."""

    def link_lost(self, peer: PeerId, reason: str) -> None:
        """Hear that the link is gone; frames that were waiting are dropped. Follows exactly one `link_up`."""

    def transport_lost(self, error: NetworkError) -> None:
        """Hear that the transport itself died (its daemon ended); every link was lost just before."""


class SilentListener:
    """A listener that lets everything pass; the value of `Transport.listener` until somebody sets one."""

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Ignore the frame."""

    def link_up(self, peer: PeerId) -> None:
        """Ignore the link."""

    def link_lost(self, peer: PeerId, reason: str) -> None:
        """Ignore the loss."""

    def transport_lost(self, error: NetworkError) -> None:
        """Ignore the end."""


class Transport(ABC):
    """Message passing with other peers of one run. Set `listener`, then enter with `async with`."""

    def __init__(self, *, peer: PeerId, run: Digest, limits: TransportLimits | None = None) -> None:
        self.peer = peer
        self.run = run
        self.limits = limits if limits is not None else TransportLimits()
        self.listener: TransportListener = SilentListener()
        self.is_needed: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer gets a link however many there are; a session says so of members."""
        self.is_welcome: Callable[[PeerId], bool] = lambda peer: True
        """Whether a peer that calls gets a link at all."""
        self.counters = TransportCounters()
        up, down = self.limits.upload_bytes_per_second, self.limits.download_bytes_per_second
        self.upload = Pace(up) if up is not None else None
        self.download = Pace(down) if down is not None else None

    def backlog_bytes(self) -> float:
        """Return how many bytes of bulk frames are still to go out, and what a cap makes them wait for."""
        return self.counters.bulk.bytes_waiting + (self.upload.debt_bytes() if self.upload is not None else 0.0)

    @abstractmethod
    def listen_addresses(self) -> tuple[str, ...]:
        """Return full multiaddrs, `/p2p/<id>` included, under which others may dial; empty when nobody can."""

    def listen_ports(self) -> tuple[int, ...]:
        """Return the ports of `listen_addresses`."""
        return tuple(dict.fromkeys(filter(None, map(port_in, self.listen_addresses()))))

    @abstractmethod
    async def dial(self, peer: PeerId, addresses: Sequence[str], deadline: float) -> None:
        """Open a link, both lanes, to `peer`; return at once when there is one.

        Args:
            peer: whom; the link is refused when somebody else answers.
            addresses: full multiaddrs; those of other peers are skipped.
            deadline: loop time by which this returns or raises.
        Raises:
            PeerError: no address led to the peer; the text says what happened at each.
        """

    @abstractmethod
    def post(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        """Queue `frame` to `peer` without waiting.

        A frame whose write has not begun by `deadline` (loop time) is dropped; one whose write then stalls past the
        deadline closes the link, so that a stopped peer never holds more than a queue.

        Returns:
            False when there is no link or the lane's queue has no room.
        Raises:
            ValueError: the frame is empty or longer than the lane takes: a bug of the caller.
        """

    @abstractmethod
    def waiting_bytes(self, peer: PeerId, lane: Lane) -> int:
        """Return the bytes of frames to `peer` whose write has not begun; 0 without a link."""

    @abstractmethod
    def hang_up(self, peer: PeerId) -> None:
        """Close the link to `peer`, if any; the listener hears `link_lost` before this returns.

        Frames whose write has begun still arrive; those that wait are dropped.
        """

    @abstractmethod
    def linked_peers(self) -> frozenset[PeerId]:
        """Return the peers with a live link. Sort before iterating where order matters: hashes differ by process."""

    @abstractmethod
    async def remote_hosts(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the IP addresses from which connected peers are seen here, nearest knowledge there is; never relayed.

        Raises:
            PeerError: the transport cannot tell now.
        """

    @abstractmethod
    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        """Dial `peer` afresh at one place, whether it is linked or not, and check who answers; no link comes about.

        Args:
            host: an IP address.
            deadline: loop time by which this returns or raises.
        Raises:
            PeerError: it cannot be dialled there; the text says why.
        """

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Start. Raises NetworkError or ConfigError with what to do about it."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all links and everything that was started; nothing stays behind on the machine.

        Waits up to `linger_seconds` for frames on their way out. The own listener hears nothing any more.
        """

    def _check_frame(self, frame: Frame, lane: Lane) -> None:
        longest = self.limits.frame_bytes(lane)
        if not 0 < len(frame) <= longest:
            raise ValueError(f"a {lane.value} frame holds 1 to {longest} bytes, not {len(frame)}")

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call the listener; its bugs go to the loop's exception handler and take nothing else down."""
        try:
            callback(*arguments)
        except Exception as error:
            message = f"the transport's listener failed in {getattr(callback, '__name__', callback)}"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    def _hand_over(self, sender: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> str | None:
        """Count and deliver one frame; return why the link must be closed, if the listener says so."""
        counters = self.counters.lane(lane)
        counters.frames_received += 1
        counters.bytes_received += len(frame) + FRAME_PREFIX_BYTES
        try:
            self.listener.frame_received(sender, lane, frame)
        except PeerError as error:
            return str(error)
        except Exception as error:
            message = f"the transport's listener failed on a {lane.value} frame of {short_peer_id(sender)}"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
        return None
