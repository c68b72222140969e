"""A link as a bundle of streams to one peer: its queues, and the readers and writers of its lanes.

A lane is read and written frame by frame, no faster than the caps allow. With an upload cap, the frames of bulk lanes
take turns and are sent in pieces, within the cap. A frame whose reader is slower than the cap gives up its turn, so
that other peers do not wait for a slow reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.transport.byte_stream import WRITE_BUFFER_BYTES
from p2p_diloco.transport.framing import (
    NO_SIGNS,
    READ_MODULUS,
    STALL_SECONDS,
    LaneStream,
    SignsOfLife,
    blame,
    drain,
    frame_prefix,
    not_read_in_time,
    read_frame,
    reading_of,
    write_frame,
)
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Lane, TransportCounters, TransportLimits, whole
from p2p_diloco.transport.outbox import FlightWindow, Outbox, PostedFrame
from p2p_diloco.transport.rate_limit import WIRE_BYTES_PER_FRAME, Pace, TokenBucket

REPEAT_SECONDS = 0.25
CROSSING_SECONDS = 20.0
"""Time in which a dial and its greeting end; dials that cross are no further apart."""
EXPIRY_SECONDS = 1e-3
"""Tolerance after a deadline, for rounding differences between clocks."""
CONTROL_BURST_SECONDS = 8.0
MOST_CONTROL_SHARE = 0.25
"""Maximum share of a download cap for the control frames of one peer; more would leave too little for the others."""


class StreamLink:
    """All streams to one peer. The link is up as long as each lane has at least one.

    Two peers that dial each other simultaneously have two streams per lane: both are read, but only the first live one
    is written, to keep the order.

    Attributes:
        flight: window of the bulk frames in flight.
        landed: set when some of them have been read, or are lost.
    """

    __slots__ = (
        "_is_repeating", "_own_read", "_their_read", "counters", "flight", "is_lost", "is_up", "landed", "outboxes",
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
        self._own_read = self._their_read = 0
        self._is_repeating = False

    def add(self, stream: LaneStream) -> None:
        """Add a stream; repeat the acknowledgement on it, since the other end may have missed the last one."""
        self.streams[stream.lane].append(stream)
        if self.is_up:
            self._send_acknowledgement()

    def remove(self, stream: LaneStream) -> None:
        """Remove a stream; its frames in flight are lost, and the acknowledgement is repeated."""
        if stream in self.streams[Lane.BULK][:1]:
            self.flight.lose()
            self.landed.set()
        self.streams[stream.lane].remove(stream)
        self._send_acknowledgement()

    def acknowledge(self, num_bytes: int) -> None:
        """Acknowledge `num_bytes` more bytes of the other end's bulk frames, so that it can send more.

        The acknowledgement contains the total, so that losing one does no harm.
        """
        self._own_read = (self._own_read + num_bytes) % READ_MODULUS
        self._send_acknowledgement()

    def _send_acknowledgement(self) -> None:
        """Send the acknowledgement on the newest control stream; retry later if its buffer is full."""
        for stream in self.streams[Lane.CONTROL][-1:]:
            if stream.connection.unsent_bytes() <= WRITE_BUFFER_BYTES:
                with contextlib.suppress(OSError):  # the stream's reader handles the loss
                    stream.connection.write(reading_of(self._own_read))
            elif not self._is_repeating:
                self._is_repeating = True
                asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._repeat)

    def _repeat(self) -> None:
        self._is_repeating = False
        self._send_acknowledgement()

    def take_read_count(self, total: int) -> None:
        """Handle an acknowledgement of the total bytes of bulk frames read by the other end."""
        num_bytes, self._their_read = (total - self._their_read) % READ_MODULUS, total
        now = asyncio.get_running_loop().time()
        known = self.flight.read(num_bytes, now)
        if known:
            self.counters.bulk.count_read(known, now)
            self.landed.set()

    def start(self, writers: list[asyncio.Task[None]]) -> None:
        """Note that the link is up, and the tasks that write its lanes."""
        self.is_up, self.writers = True, writers

    def all_streams(self) -> list[LaneStream]:
        return [stream for streams in self.streams.values() for stream in streams]

    def bytes_received(self) -> int:
        """Return the bytes received on the open streams, read or not."""
        return sum(stream.connection.bytes_received for stream in self.all_streams())

    @property
    def farewell(self) -> str:
        """The reason given when the other end has closed the link."""
        return f"{short_peer_id(self.peer)} closed the connection"

    def is_idle(self) -> bool:
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


class LaneReader:
    """The reader of one stream, no faster than the bandwidth cap and the lane's limit allow.

    Unread bytes stay in the daemon, then in TCP, then at the sender: this is the only back-pressure.

    Args:
        pace: bandwidth cap: bulk frames wait for it, control frames are only counted.
        was_read: called with the total bytes of bulk frames that the sender acknowledges.
        may_read: see `Transport.serve`.
    """

    def __init__(
        self,
        sender: PeerId,
        stream: LaneStream,
        *,
        limits: TransportLimits,
        pace: Pace,
        was_read: Callable[[int], None] = lambda num_bytes: None,
        may_read: Callable[[PeerId, Lane, bytes, int], bool] = lambda peer, lane, head, length: True,
    ) -> None:
        self._sender, self._stream, self._limits, self._pace = sender, stream, limits, pace
        self._was_read, self._may_read = was_read, may_read
        self.skipped_bytes = 0
        """Length of the frame that was skipped last."""
        rate, cap = limits.control_bytes_per_second, limits.download_bytes_per_second
        if cap is not None:
            rate = min(rate, MOST_CONTROL_SHARE * cap)
        self._control = TokenBucket(per_second=rate, burst=CONTROL_BURST_SECONDS * rate)

    async def next_frame(self) -> bytes | bytearray | memoryview | None:
        """Return the next frame, no bytes for one that was skipped, or None at the end of the stream.

        For errors, see `read_frame`.
        """
        is_bulk = self._stream.lane is Lane.BULK
        while True:
            frame = await read_frame(
                self._stream.connection,
                sender=self._sender,
                lane=self._stream.lane,
                limits=self._limits,
                pace=self._pace if is_bulk else None,
                may_read=self._judge,
            )
            if isinstance(frame, int):
                self._was_read(frame)
                await self._slow_down(WIRE_BYTES_PER_FRAME)
                continue
            if frame is not None and not is_bulk:
                await self._slow_down((len(frame) or self.skipped_bytes) + FRAME_PREFIX_BYTES)
            return frame

    def _judge(self, head: bytes, length: int) -> bool:
        self.skipped_bytes = length
        return self._may_read(self._sender, self._stream.lane, head, length)

    async def _slow_down(self, num_bytes: int) -> None:
        """Count a control frame; wait only if the sender floods this lane."""
        self._pace.count(num_bytes)
        now = asyncio.get_running_loop().time()
        at = self._control.spend(num_bytes, now)
        if at > now:
            await asyncio.sleep(at - now)


class LaneWriter:
    """The writer of the queue of one lane; `run` is a task of its link, until that is lost.

    Args:
        pace: bandwidth cap: bulk frames wait for it, control frames are only counted.
        went_idle: set when nothing is left to write.
        end_stream: called with a stream that must be closed, and the reason.
    """

    def __init__(
        self,
        link: StreamLink,
        lane: Lane,
        *,
        limits: TransportLimits,
        pace: Pace,
        went_idle: asyncio.Event,
        end_stream: Callable[[StreamLink, LaneStream, str], None],
    ) -> None:
        self._link, self._lane, self._counters, self._limits = link, lane, link.counters.lane(lane), limits
        self._pace = pace
        self._went_idle = went_idle
        self._end_stream = end_stream
        self._signs = SignsOfLife(
            lambda: link.flight.last_read_at, link.bytes_received if lane is Lane.BULK else NO_SIGNS.bytes_received
        )
        self._has_turn = False

    async def run(self) -> None:
        link, lane = self._link, self._lane
        while not link.is_lost:
            if not len(link.outboxes[lane]):
                link.writing.discard(lane)
                self._went_idle.set()
                link.wakes[lane].clear()
                await link.wakes[lane].wait()
                continue
            link.writing.add(lane)
            if lane is Lane.BULK and not await self._wait_for_room():
                continue
            if self._pace.is_capped and lane is Lane.BULK:
                await self._write_in_turn()
            else:
                await self._write_whole()

    async def _wait_for_room(self) -> bool:
        """Wait until the window has room for the next frame; False if there is no frame left, or the link is lost.

        Without progress, give up at the time at which the reader would itself give up waiting for such a frame.
        """
        link, loop = self._link, asyncio.get_running_loop()
        while not link.is_lost:
            posted, oldest = link.outboxes[self._lane].first(loop.time()), link.flight.oldest
            if posted is None:
                return False
            if oldest is None or link.flight.has_room(len(posted.frame) + FRAME_PREFIX_BYTES):
                return True
            last = max(oldest.at, oldest.deadline, link.flight.last_read_at)
            given_up_at = last + self._limits.longest_seconds(link.flight.bytes_under_way)
            if loop.time() >= given_up_at:
                self._end_stream(link, link.streams[self._lane][0], not_read_in_time(link.peer, self._lane))
                return False
            link.landed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(posted.deadline + EXPIRY_SECONDS, given_up_at)):
                    await link.landed.wait()
        return False

    async def _write_whole(self) -> None:
        """Write the first frame that has not expired, if any."""
        stream, posted = self._link.streams[self._lane][0], self._take()
        if posted is None:
            return
        self._pace.count(len(posted.frame) + FRAME_PREFIX_BYTES)
        self._counters.count_sent(len(posted.frame) + FRAME_PREFIX_BYTES)
        try:
            await write_frame(
                stream.connection,
                posted.frame,
                receiver=self._link.peer,
                lane=self._lane,
                deadline=posted.deadline,
                limits=self._limits,
                signs=self._signs,
            )
        except PeerError as error:
            self._end_stream(self._link, stream, str(error))

    async def _write_in_turn(self) -> None:
        """Write the first frame that has not expired when it is this lane's turn, which may take long."""
        try:
            await self._take_turn()
            stream, posted = self._link.streams[self._lane][0], self._take()
            if posted is not None:
                await self._write_paced(stream, posted)
        except PeerError as error:
            self._end_stream(self._link, stream, str(error))
        finally:
            self._end_turn()

    async def _take_turn(self) -> None:
        await self._pace.turn.acquire()
        self._has_turn = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._pace.turn.release()

    def _take(self) -> PostedFrame | None:
        """Return the first frame that has not expired; None if there is none, or no room for it."""
        outbox, flight, now = self._link.outboxes[self._lane], self._link.flight, asyncio.get_running_loop().time()
        posted = outbox.first(now)
        if posted is None:
            return None
        if self._lane is Lane.BULK:
            num_bytes = len(posted.frame) + FRAME_PREFIX_BYTES
            if not flight.has_room(num_bytes):
                return None
            flight.send(num_bytes, now, posted.deadline)
        self._counters.count_sent(0, num_frames=1)
        return outbox.take(now)

    async def _write_paced(self, stream: LaneStream, posted: PostedFrame) -> None:
        """Write a frame piece by piece, holding the turn; waiting for the cap does not count against the other end."""
        frame = memoryview(frame_prefix(posted.frame) + whole(posted.frame))
        left = len(frame)
        self._counters.count_waiting(left)
        patience = self._limits.longest_seconds(left)
        try:
            with blame(self._link.peer, self._lane):
                while left > 0:
                    piece = frame[len(frame) - left :][: self._pace.piece_bytes]
                    await self._pace.wait_for(len(piece))
                    stream.write_piece(piece, is_last=len(piece) == left)
                    left -= len(piece)
                    self._counters.count_sent(len(piece))
                    self._counters.count_waiting(-len(piece))
                    patience -= await self._give_way(stream, posted.deadline, patience)
        finally:
            self._counters.count_waiting(-left)

    async def _give_way(self, stream: LaneStream, deadline: float, patience: float) -> float:
        """Give up the turn while this frame's reader is behind; return the seconds waited past its deadline."""
        if stream.connection.unsent_bytes() <= WRITE_BUFFER_BYTES:
            return 0.0
        loop = asyncio.get_running_loop()
        began = max(loop.time(), deadline)
        # If the cap has used up the time until the deadline, give the reader a moment to make progress.
        first = deadline if loop.time() < deadline else min(loop.time() + STALL_SECONDS, began + patience)
        self._end_turn()
        await drain(stream.connection, first, began + patience, self._signs)
        waited = max(loop.time() - began, 0.0)
        await self._take_turn()
        return waited
