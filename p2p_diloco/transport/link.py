"""The interface to the network: framed messages over authenticated links between peers.

A link connects two peers of one run, whichever of them dialled. It has two lanes, each a separate stream, so that small
control frames never wait for vectors. Delivery is not guaranteed: a posted frame may be lost with its link, and only a
reply confirms its arrival. `libp2p` and `memory` implement this interface; the same contract test checks both.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self, TypeAlias

from p2p_diloco.errors import NetworkError, PeerError
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.transport.addresses import port_in
from p2p_diloco.transport.rate_limit import Pace

KIB = 1024
MIB = 1024 * KIB
HEAD_BYTES = 2
FRAME_PREFIX_BYTES = 4
"""Every frame is preceded by its length as a big-endian u32."""


class Lane(enum.Enum):
    """One of the two streams of a link."""

    CONTROL = "control"
    BULK = "bulk"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is computed in Python


@dataclass(frozen=True, slots=True)
class SplitFrame:
    """A frame in two parts, so that a long vector need not be copied to follow its header.

    Attributes:
        head: the first part.
        vector: the rest; it must not change until it is sent.
    """

    head: bytes | bytearray
    vector: bytes | memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.vector)


Frame: TypeAlias = bytes | SplitFrame


def whole(frame: Frame) -> bytes:
    return b"".join((frame.head, frame.vector)) if isinstance(frame, SplitFrame) else frame


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds on what any peer can cause, whatever it sends or fails to read.

    Attributes:
        control_frame_bytes: maximum size of a control frame, without its length prefix.
        bulk_frame_bytes: maximum size of a bulk frame, without its length prefix.
        control_queue_bytes: maximum bytes queued on one link's control lane.
        bulk_queue_bytes: maximum bytes queued on one link's bulk lane.
        frame_seconds: once a frame's length is read, the rest must arrive within this time plus the time for its bytes
            at `slowest_bytes_per_second`; a writer waits no longer than that after the deadline.
        slowest_bytes_per_second: rate of the slowest supported connection.
        control_bytes_per_second: maximum sustained rate at which a peer's control frames are read.
        upload_bytes_per_second, download_bytes_per_second: bandwidth caps, including packet overhead; None: no cap.
            Bulk frames wait for them, control frames are only counted.
        linger_seconds: how long closing waits for frames that are being sent.
        links: maximum number of linked peers; further ones are refused, unless the run needs them.
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
        return self.control_frame_bytes if lane is Lane.CONTROL else self.bulk_frame_bytes

    def queue_bytes(self, lane: Lane) -> int:
        return self.control_queue_bytes if lane is Lane.CONTROL else self.bulk_queue_bytes

    def longest_seconds(self, frame_bytes: int) -> float:
        """Return the maximum time that the other end may take for a frame."""
        return self.frame_seconds + frame_bytes / self.slowest_bytes_per_second


@dataclass(slots=True, kw_only=True)
class LaneCounters:
    """Traffic of one lane since the start, summed over all links; bytes include the length prefixes."""

    frames_sent: int = 0
    bytes_sent: int = 0
    bytes_read: int = 0
    """Sent bytes that the other ends have acknowledged; bulk frames only."""
    last_read_at: float = 0.0
    """Loop time of the last acknowledgement."""
    frames_received: int = 0
    bytes_received: int = 0
    frames_dropped: int = 0
    """Frames whose deadline passed, or whose link was lost, before their write began."""
    bytes_waiting: int = 0
    """Bytes of posted frames that are not written yet, without their prefixes."""

    def count_sent(self, num_bytes: int, *, num_frames: int = 0) -> None:
        """Count bytes, and frames that begin with them."""
        self.frames_sent += num_frames
        self.bytes_sent += num_bytes

    def count_read(self, num_bytes: int, now: float) -> None:
        """Count bytes that the other end has read."""
        self.bytes_read += num_bytes
        self.last_read_at = now

    def count_received(self, frame_bytes: int) -> None:
        """Count a frame, and its prefix."""
        self.frames_received += 1
        self.bytes_received += frame_bytes + FRAME_PREFIX_BYTES

    def count_dropped(self, num_frames: int) -> None:
        self.frames_dropped += num_frames

    def count_waiting(self, num_bytes: int) -> None:
        """Count bytes that wait from now on; fewer than 0 if they wait no longer."""
        self.bytes_waiting += num_bytes


@dataclass(slots=True, kw_only=True)
class TransportCounters:
    """Traffic of one transport by lane."""

    control: LaneCounters = field(default_factory=LaneCounters)
    bulk: LaneCounters = field(default_factory=LaneCounters)

    def lane(self, lane: Lane) -> LaneCounters:
        return self.control if lane is Lane.CONTROL else self.bulk


def frame_too_long(sender: PeerId, lane: Lane, frame_bytes: int, longest_bytes: int) -> str:
    """Return the reason for a link closed because the other end announced a frame that is too long."""
    name = short_peer_id(sender)
    return f"{name} announced a {lane.value} frame of {frame_bytes} bytes where 1 to {longest_bytes} are allowed"


MayRead: TypeAlias = Callable[[PeerId, Lane, bytes, int], bool]


class TransportListener:
    """Callbacks of a transport, called in its loop. They must be synchronous and short; they may post and hang up.

    Override those that matter: the others do nothing, and a transport without another listener has this one.
    """

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Called with each frame of an authenticated peer, in order per lane and link.

        Raising PeerError closes the link, with its text as the reason.
        """

    def link_up(self, peer: PeerId) -> None:
        """Called when frames to `peer` can be posted."""

    def link_lost(self, peer: PeerId, reason: str) -> None:
        """Called when the link to `peer` is lost; queued frames are dropped. Follows exactly one `link_up`."""

    def disturbed(self, peer: PeerId, text: str) -> None:
        """Called when a peer that may have no link wastes this machine's time; the text says how and what is done."""

    def transport_lost(self, error: NetworkError) -> None:
        """Called when the transport itself has failed (its daemon ended), after every link was lost."""


class Transport(ABC):
    """Message passing between the peers of one run. Call `serve`, then enter with `async with`."""

    def __init__(self, *, peer: PeerId, run: Digest, limits: TransportLimits | None = None) -> None:
        self.peer = peer
        self.run = run
        self.limits = limits if limits is not None else TransportLimits()
        self.listener: TransportListener = TransportListener()
        self.is_needed: Callable[[PeerId], bool] = lambda peer: False
        self.is_welcome: Callable[[PeerId], bool] = lambda peer: True
        self.may_read: MayRead = lambda peer, lane, head, length: True
        self.lost: NetworkError | None = None
        """Why the transport has failed, if it has."""
        self.counters = TransportCounters()
        self.upload = Pace(self.limits.upload_bytes_per_second)
        self.download = Pace(self.limits.download_bytes_per_second)

    def serve(
        self,
        listener: TransportListener | None = None,
        *,
        may_read: MayRead | None = None,
        is_needed: Callable[[PeerId], bool] | None = None,
        is_welcome: Callable[[PeerId], bool] | None = None,
    ) -> None:
        """Call `listener` from now on, and follow these rules; what is left out stays as it is.

        Args:
            listener: see `TransportListener`; at first nothing is called.
            may_read: returns whether to read a frame, given its first `HEAD_BYTES` bytes and its length; otherwise it
                is skipped. Raising FrameError closes the link, with its text as the reason. No memory is taken before
                this returns. At first all frames are read.
            is_needed: returns whether a peer gets a link even beyond the limit, as members do; at first nobody does.
            is_welcome: returns whether a peer that dials gets a link at all; at first everybody does.
        """
        self.listener = listener if listener is not None else self.listener
        self.may_read = may_read or self.may_read
        self.is_needed = is_needed or self.is_needed
        self.is_welcome = is_welcome or self.is_welcome

    def backlog_bytes(self) -> float:
        """Return the bytes of bulk frames still to be sent, plus those booked ahead under a cap."""
        return self.counters.bulk.bytes_waiting + self.upload.debt_bytes()

    def set_caps(self, *, upload: float | None, download: float | None) -> None:
        """Change the bandwidth caps in `limits`, also for frames that wait; bytes per second, None: no cap."""
        self.limits = replace(self.limits, upload_bytes_per_second=upload, download_bytes_per_second=download)
        self.upload.set_rate(upload)
        self.download.set_rate(download)

    @abstractmethod
    def listen_addresses(self) -> tuple[str, ...]:
        """Return full multiaddrs, including `/p2p/<id>`, for others to dial; empty if this peer does not listen."""

    def listen_ports(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(filter(None, map(port_in, self.listen_addresses()))))

    @abstractmethod
    async def dial(self, peer: PeerId, addresses: Sequence[str], deadline: float) -> None:
        """Open a link, both lanes, to `peer`; return immediately if there is one.

        Args:
            peer: the peer to dial; fails if another peer answers.
            addresses: full multiaddrs; those of other peers are skipped.
            deadline: loop time by which this returns or raises.
        Raises:
            PeerError: the peer could not be reached at any address; the text gives the reason for each.
        """

    @abstractmethod
    def post(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        """Queue `frame` to `peer` without waiting.

        A frame whose write has not begun by `deadline` (loop time) is dropped; if its write stalls past the deadline
        and nothing arrives from the peer, the link is closed, so that a stopped peer never occupies more than a queue.

        Returns:
            False if there is no link or the lane's queue is full.
        Raises:
            ValueError: the frame is empty or too long for the lane: a bug of the caller.
        """

    @abstractmethod
    def waiting_bytes(self, peer: PeerId, lane: Lane) -> int:
        """Return the bytes of frames to `peer` whose write has not begun; 0 without a link."""

    @abstractmethod
    def hang_up(self, peer: PeerId) -> None:
        """Close the link to `peer`, if any; `link_lost` is called before this returns.

        Frames whose write has begun still arrive; queued ones are dropped.
        """

    @abstractmethod
    def linked_peers(self) -> frozenset[PeerId]:
        """Return the peers with a live link. Sort them where order matters: hashes differ between processes."""

    @abstractmethod
    async def remote_hosts(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the IP addresses of connected peers as seen here; never relayed ones.

        Raises:
            PeerError: they are not available at the moment.
        """

    @abstractmethod
    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        """Dial `peer` at one address, linked or not, and check who answers; opens no link.

        Args:
            host: an IP address.
            deadline: loop time by which this returns or raises.
        Raises:
            PeerError: it cannot be dialled there; the text gives the reason.
        """

    async def why_unreachable(self, peer: PeerId, host: str, port: int, deadline: float) -> PeerError | None:
        """Return why `probe` fails at one address, or None if it does not."""
        try:
            await self.probe(peer, host, port, deadline)
        except PeerError as error:
            return error
        return None

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Start. Raises NetworkError or ConfigError, with what to do."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all links and stop everything that was started; nothing is left on the machine.

        Waits up to `linger_seconds` for frames that are being sent. The own listener is not called any more.
        """

    def _check_frame(self, frame: Frame, lane: Lane) -> None:
        longest = self.limits.frame_bytes(lane)
        if not 0 < len(frame) <= longest:
            raise ValueError(f"a {lane.value} frame holds 1 to {longest} bytes, not {len(frame)}")

    def _notify(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call the listener; its exceptions go to the loop's exception handler and stop nothing else."""
        try:
            callback(*arguments)
        except Exception as error:
            _report_failure(f"in {getattr(callback, '__name__', callback)}", error)

    def _hand_over(self, sender: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> str | None:
        """Count and deliver one frame; return a reason to close the link if the listener raises PeerError."""
        self.counters.lane(lane).count_received(len(frame))
        try:
            self.listener.frame_received(sender, lane, frame)
        except PeerError as error:
            return str(error)
        except Exception as error:
            _report_failure(f"on a {lane.value} frame of {short_peer_id(sender)}", error)
        return None


def _report_failure(where: str, error: Exception) -> None:
    message = f"the transport's listener failed {where}"
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
