"""Frames on a byte stream: u32 length, then that many bytes. Reads and writes both end in bounded time.

A length of zero is the greeting, sent once by each end of a new stream. It proves that the other *process* reads, not
only its daemon: the daemon of a stopped peer still accepts streams. A length with the highest bit set is an
acknowledgement: the total number of bytes of bulk frames read by this end, for the other end's `FlightWindow`. No frame
follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.transport.byte_stream import WRITE_BUFFER_BYTES, ByteStream
from p2p_diloco.transport.link import (
    FRAME_PREFIX_BYTES,
    HEAD_BYTES,
    Frame,
    Lane,
    SplitFrame,
    TransportLimits,
    frame_too_long,
)
from p2p_diloco.transport.rate_limit import Pace

STALL_SECONDS = 5.0
"""A frame may take longer than its deadline while its reader makes progress, but not without progress for this long."""
ALIVE_SECONDS = 3 * STALL_SECONDS
"""A packet that is lost again and again holds up one direction for seconds, and a new connection begins slowly."""
READ_MODULUS = 2**31
_LENGTH = struct.Struct(">I")
_GREETING = _LENGTH.pack(0)
END = _LENGTH.pack(0)
"""The last frame of a stream. Half-closing is not an alternative: at its end p2pd closes the receiver's socket in both
directions, and a write that then fails discards what the receiver has not read yet."""
_ONE_WRITE_BYTES = 64 * 1024
_ONE_SKIP_BYTES = 16 * 1024


class SignsOfLife(NamedTuple):
    """Signs that the other end of a link is there while a write stalls.

    Attributes:
        last_read_at: returns the time of its last acknowledgement, since the frames that it reads are already buffered
            by daemons.
        bytes_received: returns a number that changes when something arrives from it.
    """

    last_read_at: Callable[[], float]
    bytes_received: Callable[[], int]


NO_SIGNS = SignsOfLife(lambda: float("-inf"), lambda: 0)


def reading_of(num_bytes: int) -> bytes:
    """Return the acknowledgement for a total of `num_bytes` bytes of bulk frames read, modulo `READ_MODULUS`."""
    return _LENGTH.pack(READ_MODULUS | num_bytes)


class LaneStream:
    """One open stream of a link, with its reading task.

    Attributes:
        connection: its bytes.
        crosses_until: loop time until which the other end may add a stream by a dial that crossed ours; -inf if it was
            the other end that dialled.
        has_run_out: whether the other end has ended it.
        is_cut: whether a frame is partly written.
    """

    __slots__ = ("connection", "crosses_until", "has_run_out", "is_cut", "lane", "task")

    def __init__(self, lane: Lane, connection: ByteStream, *, crosses_until: float = -math.inf) -> None:
        self.lane = lane
        self.connection = connection
        self.crosses_until = crosses_until
        self.task: asyncio.Task[None] | None = None
        self.has_run_out = False
        self.is_cut = False
        connection.limit_buffer()

    @property
    def is_ours(self) -> bool:
        return self.crosses_until > -math.inf

    def read_in(self, task: asyncio.Task[None]) -> None:
        """Note the task that reads this stream."""
        self.task = task

    def run_out(self) -> None:
        """Note that the other end has ended it."""
        self.has_run_out = True

    def write_piece(self, piece: bytes | memoryview, *, is_last: bool) -> None:
        self.connection.write(piece)
        self.is_cut = not is_last

    async def close_gently(self, linger_seconds: float) -> None:
        """Flush the buffer, send `END`, and close once the other end has closed or `linger_seconds` have passed.

        Within a frame, `END` would be read as part of it, so a cut stream is half-closed instead.
        """
        try:
            async with asyncio.timeout(linger_seconds):
                if self.task is not None:
                    await asyncio.wait({self.task})
                if self.is_cut:
                    self.connection.write_eof()
                else:
                    self.connection.write(END)
                while await self.connection.read(WRITE_BUFFER_BYTES):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            self.connection.abort()


async def greet(stream: ByteStream) -> None:
    """Send the greeting and wait for the other end's; limit it with `asyncio.timeout_at`.

    Raises:
        FrameError: something else arrived, or the stream ended.
    """
    try:
        stream.write(_GREETING)
        received = await stream.readexactly(FRAME_PREFIX_BYTES)
    except (asyncio.IncompleteReadError, OSError):
        raise FrameError("the stream was closed before the greeting") from None
    if received != _GREETING:
        raise FrameError("the stream did not begin with a greeting")


async def read_frame(
    stream: ByteStream,
    *,
    sender: PeerId,
    lane: Lane,
    limits: TransportLimits,
    pace: Pace | None = None,
    may_read: Callable[[bytes, int], bool] = lambda head, length: True,
) -> bytes | bytearray | memoryview | int | None:
    """Return the next frame, or None at `END` or at the end of the stream. Waits for a length without limit.

    On the control lane it may return an int instead: the total bytes of bulk frames read by the sender. A frame that
    was skipped is returned as no bytes.

    Args:
        may_read: given a frame's first bytes and its length, returns whether to read or skip it; see
            `Transport.serve`.
        pace: bandwidth cap for frames that must wait for it; that time does not count against the sender.
    Raises:
        FrameError: the frame is too long or was cut off; memory is allocated only as its bytes arrive.
        PeerError: the stream broke, or the frame did not arrive in time.
    """
    name = short_peer_id(sender)
    try:
        length = _LENGTH.unpack(await stream.readexactly(FRAME_PREFIX_BYTES))[0]
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FrameError(f"{name} closed the connection within the length of a {lane.value} frame") from None
        return None
    except OSError:
        # The daemon resets an ended stream if it has not forwarded everything written to it;
        # what arrived before was read.
        return None
    if length >= READ_MODULUS and lane is Lane.CONTROL:
        return int(length - READ_MODULUS)
    if length == 0:
        return None
    longest = limits.frame_bytes(lane)
    if length > longest:
        raise FrameError(frame_too_long(sender, lane, length, longest))
    seconds = limits.longest_seconds(length)
    try:
        async with asyncio.timeout(seconds):
            head = await stream.peek(min(HEAD_BYTES, length))
        if not may_read(head, length):
            await _skip(stream, length, seconds, pace)
            return b""
        if pace is not None and pace.is_capped:
            return await _read_in_pieces(stream, length, seconds, pace)
        async with asyncio.timeout(seconds):
            return await stream.readexactly(length)
    except asyncio.IncompleteReadError as error:
        came = len(error.partial)
        raise FrameError(f"{name} sent {came} of {length} bytes of a {lane.value} frame and disconnected") from None
    except TimeoutError:
        raise PeerError(f"{name} did not finish a {lane.value} frame of {length} bytes in {seconds:.1f} s") from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


async def _skip(stream: ByteStream, length: int, seconds: float, pace: Pace | None) -> None:
    """Read `length` bytes and forget them."""
    async with asyncio.timeout(seconds):
        while length > 0:
            piece = len(await stream.readexactly(min(length, _ONE_SKIP_BYTES)))
            length -= piece
            if pace is not None:
                pace.count(piece)


async def _read_in_pieces(stream: ByteStream, length: int, seconds: float, pace: Pace) -> bytes:
    """Read `length` bytes within the bandwidth cap; wait for the sender at most `seconds`."""
    loop = asyncio.get_running_loop()
    frame = bytearray()
    while len(frame) < length:
        piece = min(length - len(frame), pace.piece_bytes)
        await pace.wait_for(piece)
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                frame += await stream.readexactly(piece)
        except asyncio.IncompleteReadError as error:
            raise asyncio.IncompleteReadError(bytes(frame) + error.partial, length) from None
        seconds -= loop.time() - began
    return bytes(frame)


async def write_frame(
    stream: ByteStream,
    frame: Frame,
    *,
    receiver: PeerId,
    lane: Lane,
    deadline: float,
    limits: TransportLimits,
    signs: SignsOfLife = NO_SIGNS,
) -> None:
    """Write one frame by `deadline` (loop time), or later while the other end keeps reading: it may be slow.

    It must have read the whole frame by the time at which it would itself give up on such a frame.

    Raises:
        PeerError: the stream broke, or the other end does not read; the stream is unusable after a partial write.
    """
    with blame(receiver, lane):
        if isinstance(frame, SplitFrame):
            stream.write(frame_prefix(frame) + frame.head)
            stream.write(frame.vector)
        elif len(frame) < _ONE_WRITE_BYTES:
            stream.write(frame_prefix(frame) + frame)
        else:
            stream.write(frame_prefix(frame))
            stream.write(frame)
        await drain(stream, deadline, deadline + limits.longest_seconds(len(frame)), signs)


@contextlib.contextmanager
def blame(receiver: PeerId, lane: Lane) -> Iterator[None]:
    """Convert write errors into a PeerError of the peer that does not read."""
    name = short_peer_id(receiver)
    try:
        yield
    except TimeoutError:
        raise PeerError(not_read_in_time(receiver, lane)) from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


def not_read_in_time(receiver: PeerId, lane: Lane) -> str:
    """Return the reason for a link lost because the other end reads too slowly or not at all."""
    return f"{short_peer_id(receiver)} did not read a {lane.value} frame by its deadline"


def frame_prefix(frame: Frame) -> bytes:
    return _LENGTH.pack(len(frame))


async def drain(stream: ByteStream, deadline: float, last: float, signs: SignsOfLife = NO_SIGNS) -> None:
    """Wait until there is room again.

    Raises:
        TimeoutError: there was no progress by the deadline, or later for `STALL_SECONDS`, or no room by `last`. Until
            `ALIVE_SECONDS` after the deadline, whatever arrives from the other end counts as progress.
    """
    if stream.has_room():
        return  # the common case, without a timer
    loop = asyncio.get_running_loop()
    left, read_at, received = stream.unsent_bytes(), signs.last_read_at(), signs.bytes_received()
    until = max(
        deadline, min(loop.time() + STALL_SECONDS, last)
    )  # after a late start, give the reader time to make progress
    while True:
        try:
            async with asyncio.timeout_at(until):
                return await stream.drain()
        except TimeoutError:
            now, now_left = loop.time(), stream.unsent_bytes()
            reads = now_left < left or signs.last_read_at() > read_at
            is_alive = signs.bytes_received() != received and now < deadline + ALIVE_SECONDS
            if not (reads or is_alive) or now >= last:
                raise
            left, read_at, received = now_left, signs.last_read_at(), signs.bytes_received()
            until = min(now + STALL_SECONDS, last)
