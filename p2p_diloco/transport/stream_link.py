"""A link as a bundle of streams to one peer, with its queues and writers."""

from __future__ import annotations

import asyncio
import contextlib
import math

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.transport.byte_stream import ByteReader, ByteWriter
from p2p_diloco.transport.framing import END, READ_MODULUS, WRITE_BUFFER_BYTES, reading_of
from p2p_diloco.transport.link import Lane, TransportCounters, TransportLimits
from p2p_diloco.transport.outbox import FlightWindow, Outbox

StreamPair = tuple[ByteReader, ByteWriter]
SAY_AGAIN_SECONDS = 0.25
CROSSING_SECONDS = 20.0
"""Time in which a dial and its greeting end; dials that cross are no further apart."""


class LaneStream:
    """One open stream of a link, with its reading task.

    Attributes:
        crosses_until: loop time until which the other end may add a stream by a dial that crossed ours; -inf if it was
            the other end that dialled.
        has_run_out: whether the other end has ended it.
        is_cut: whether a frame is partly written.
    """

    __slots__ = ("crosses_until", "has_run_out", "is_cut", "lane", "reader", "task", "writer")

    def __init__(self, lane: Lane, pair: StreamPair, *, crosses_until: float = -math.inf) -> None:
        self.lane = lane
        self.crosses_until = crosses_until
        self.reader, self.writer = pair
        self.task: asyncio.Task[None] | None = None
        self.has_run_out = False
        self.is_cut = False
        if not self.writer.transport.is_closing():  # uvloop raises if the other end is already gone
            self.writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    @property
    def is_ours(self) -> bool:
        """Whether this end dialled."""
        return self.crosses_until > -math.inf

    async def close_gently(self, linger_seconds: float) -> None:
        """Flush the buffer, send `END`, and close once the other end has closed or `linger_seconds` have passed.

        Within a frame, `END` would be read as part of it, so a cut stream is half-closed instead.
        """
        try:
            async with asyncio.timeout(linger_seconds):
                if self.task is not None:
                    await asyncio.wait({self.task})
                if self.is_cut:
                    self.writer.write_eof()
                else:
                    self.writer.write(END)
                while await self.reader.read(WRITE_BUFFER_BYTES):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            self.writer.transport.abort()


class StreamLink:
    """All streams to one peer. The link is up as long as each lane has at least one.

    Two peers that dial each other simultaneously have two streams per lane: both are read, but only the first live one
    is written, to keep the order.

    Attributes:
        flight: window of the bulk frames in flight.
        landed: set when some of them have been read, or are lost.
    """

    __slots__ = (
        "_heard_read", "_own_read", "_says_later", "counters", "flight", "is_lost", "is_up", "landed", "outboxes",
        "peer", "streams", "wakes", "writers", "writing",
    )  # fmt: skip

    def __init__(self, peer: PeerId, limits: TransportLimits, counters: TransportCounters) -> None:
        self.peer = peer
        self.counters = counters
        self.streams: dict[Lane, list[LaneStream]] = {lane: [] for lane in Lane}
        self.outboxes = {lane: Outbox(limits.queue_bytes(lane), counters.lane(lane)) for lane in Lane}
        self.wakes = {lane: asyncio.Event() for lane in Lane}
        self.writers: list[asyncio.Task[None]] = []
        self.writing: set[Lane] = set()
        self.is_up = False
        self.is_lost = False
        self.flight = FlightWindow()
        self.landed = asyncio.Event()
        self._own_read = self._heard_read = 0
        self._says_later = False

    def add(self, stream: LaneStream) -> None:
        """Add a stream; repeat the acknowledgement on it, since the other end may have missed the last one."""
        self.streams[stream.lane].append(stream)
        if self.is_up:
            self._say()

    def remove(self, stream: LaneStream) -> None:
        """Remove a stream; its frames in flight are lost, and the acknowledgement is repeated."""
        if stream in self.streams[Lane.BULK][:1]:
            self.flight.lose()
            self.landed.set()
        self.streams[stream.lane].remove(stream)
        self._say()

    def say_read(self, num_bytes: int) -> None:
        """Acknowledge `num_bytes` more bytes of the other end's bulk frames, so that it can send more.

        The acknowledgement contains the total, so that losing one does no harm.
        """
        self._own_read = (self._own_read + num_bytes) % READ_MODULUS
        self._say()

    def _say(self) -> None:
        """Send the acknowledgement on the newest control stream; retry later if its buffer is full."""
        for stream in self.streams[Lane.CONTROL][-1:]:
            if stream.writer.transport.get_write_buffer_size() <= WRITE_BUFFER_BYTES:
                with contextlib.suppress(OSError):  # the stream's reader handles the loss
                    stream.writer.write(reading_of(self._own_read))
            elif not self._says_later:
                self._says_later = True
                asyncio.get_running_loop().call_later(SAY_AGAIN_SECONDS, self._say_later)

    def _say_later(self) -> None:
        self._says_later = False
        self._say()

    def take_read_count(self, total: int) -> None:
        """Handle an acknowledgement of the total bytes of bulk frames read by the other end."""
        num_bytes, self._heard_read = (total - self._heard_read) % READ_MODULUS, total
        now = asyncio.get_running_loop().time()
        known = self.flight.read(num_bytes, now)
        if known:
            self.counters.bulk.count_read(known, now)
            self.landed.set()

    def all_streams(self) -> list[LaneStream]:
        """Return the streams of both lanes."""
        return [stream for streams in self.streams.values() for stream in streams]

    def bytes_received(self) -> int:
        """Return the bytes received on the open streams, read or not."""
        return sum(stream.reader.bytes_received for stream in self.all_streams())

    @property
    def farewell(self) -> str:
        """The reason given when the other end has closed the link."""
        return f"{short_peer_id(self.peer)} closed the connection"

    def is_idle(self) -> bool:
        """Return whether there is nothing to write."""
        return not self.writing and not any(len(outbox) for outbox in self.outboxes.values())

    def has_run_out(self) -> bool:
        """Return whether the other end has ended every stream."""
        return all(stream.has_run_out for stream in self.all_streams())

    def is_outdated(self, lane: Lane, now: float) -> bool:
        """Return whether a stream that the other end opens now shows that it has lost this link.

        Its first streams may cross ours. What is decided about one lane holds for the other.
        """
        if any(not stream.is_ours for stream in self.all_streams()):
            return any(not stream.is_ours for stream in self.streams[lane])
        return any(stream.crosses_until < now for stream in self.streams[lane])

    def is_running_out(self) -> bool:
        """Return whether the other end has ended at least one stream."""
        return any(stream.has_run_out for stream in self.all_streams())

    def take_down(self) -> list[LaneStream]:
        """Cancel all tasks of the link except the caller's; return its streams, for the caller to close."""
        self.is_up, self.is_lost = False, True
        streams = self.all_streams()
        current = asyncio.current_task()
        for task in [*(stream.task for stream in streams), *self.writers]:
            if task is not None and task is not current:
                task.cancel()
        self.streams = {lane: [] for lane in Lane}
        for outbox in self.outboxes.values():
            outbox.clear()
        return streams
