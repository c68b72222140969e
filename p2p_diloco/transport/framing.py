"""Frames on a stream of bytes: u32 length, then that many bytes. Reads and writes both end in bounded time.

A length of zero is the greeting, sent once by either end of a new stream. It proves that the other *process* reads,
not only its daemon: a stopped peer's daemon goes on taking streams. A length whose highest bit is set is none: it says
how many bytes of bulk frames this end has read in all, for the other end's `FlightWindow`, and nothing follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.transport.byte_stream import ByteReader, ByteWriter
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Frame, Lane, SplitFrame, TransportLimits, frame_too_long
from p2p_diloco.transport.pace import Pace

STALL_SECONDS = 5.0
"""After its deadline a frame whose reader goes on may take longer; one that is not read for so long may not."""
WRITE_BUFFER_BYTES = 256 * 1024
"""Bytes of one stream that may lie here for the daemon to take; with more, writing waits."""
READ_MODULUS = 2**31
_LENGTH = struct.Struct(">I")
_GREETING = _LENGTH.pack(0)
END = _LENGTH.pack(0)
"""The last frame of a stream. A half-closed stream is no substitute: at its end p2pd closes the receiver's socket in
both directions, and a write that then fails discards whatever the receiver has not read yet."""
_ONE_WRITE_BYTES = 64 * 1024


def reading_of(num_bytes: int) -> bytes:
    """Return what says that so many bytes of bulk frames were read in all, modulo `READ_MODULUS`."""
    return _LENGTH.pack(READ_MODULUS | num_bytes)


async def greet(reader: ByteReader, writer: ByteWriter) -> None:
    """Send the greeting and wait for the other end's; bound it with `asyncio.timeout_at`.

    Raises:
        FrameError: something else came, or the stream ended.
    """
    try:
        writer.write(_GREETING)
        heard = await reader.readexactly(FRAME_PREFIX_BYTES)
    except (asyncio.IncompleteReadError, OSError):
        raise FrameError("the stream was closed before it began") from None
    if heard != _GREETING:
        raise FrameError("the stream did not begin with a greeting")


async def read_frame(
    reader: ByteReader, *, sender: PeerId, lane: Lane, limits: TransportLimits, pace: Pace | None = None
) -> bytes | bytearray | memoryview | int | None:
    """Return the next frame, or None at `END` or at the end of the stream. Waits for a length as long as it takes.

    On the control lane an int may come instead: how many bytes of bulk frames the sender has read in all.

    Args:
        pace: of the line, for frames that have to wait for it; their sender is not blamed for that time.
    Raises:
        FrameError: the frame is too long, or was cut off; memory is taken only as its bytes come.
        PeerError: the stream broke, or the frame did not come in time.
    """
    name = short_peer_id(sender)
    try:
        length = _LENGTH.unpack(await reader.readexactly(FRAME_PREFIX_BYTES))[0]
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FrameError(f"{name} closed the connection within a length of a {lane.value} frame") from None
        return None
    except OSError:
        # The daemon resets a stream that has ended where it has not passed on all that was
        # written to it; what came before was read.
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
        if pace is not None:
            return await _read_in_pieces(reader, length, seconds, pace)
        async with asyncio.timeout(seconds):
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        came = len(error.partial)
        raise FrameError(f"{name} sent {came} of {length} bytes of a {lane.value} frame and was gone") from None
    except TimeoutError:
        raise PeerError(f"{name} did not finish a {lane.value} frame of {length} bytes in {seconds:.1f} s") from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


async def _read_in_pieces(reader: ByteReader, length: int, seconds: float, pace: Pace) -> bytes:
    """Read so many bytes as the line's cap lets them pass; `seconds` is how long the sender may be waited for."""
    loop = asyncio.get_running_loop()
    frame = bytearray()
    while len(frame) < length:
        piece = min(length - len(frame), pace.piece_bytes)
        await pace.wait_for(piece)
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                frame += await reader.readexactly(piece)
        except asyncio.IncompleteReadError as error:
            raise asyncio.IncompleteReadError(bytes(frame) + error.partial, length) from None
        seconds -= loop.time() - began
    return bytes(frame)


async def write_frame(
    writer: ByteWriter,
    frame: Frame,
    *,
    receiver: PeerId,
    lane: Lane,
    deadline: float,
    limits: TransportLimits,
    last_read_at: Callable[[], float] = lambda: float("-inf"),
) -> None:
    """Write one frame by `deadline` (loop time), or as long as the other end goes on reading: its line may be thin.

    It must have read all of it when it would itself have given up waiting for such a frame.

    Args:
        last_read_at: when the other end said last that it reads: what it reads lies with daemons already.
    Raises:
        PeerError: the stream broke, or the other end does not read; what was written so far spoils the stream.
    """
    with blame(receiver, lane):
        if isinstance(frame, SplitFrame):
            writer.write(frame_prefix(frame) + frame.head)
            writer.write(frame.vector)
        elif len(frame) < _ONE_WRITE_BYTES:
            writer.write(frame_prefix(frame) + frame)
        else:
            writer.write(frame_prefix(frame))
            writer.write(frame)
        await drain(writer, deadline, deadline + limits.longest_seconds(len(frame)), last_read_at)


@contextlib.contextmanager
def blame(receiver: PeerId, lane: Lane) -> Iterator[None]:
    """Turn what goes wrong with writing into the error of the peer that does not read."""
    name = short_peer_id(receiver)
    try:
        yield
    except TimeoutError:
        raise PeerError(not_read_in_time(receiver, lane)) from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


def not_read_in_time(receiver: PeerId, lane: Lane) -> str:
    """Say why a link is lost whose other end reads too slowly or not at all."""
    return f"{short_peer_id(receiver)} did not read a {lane.value} frame by its deadline"


def frame_prefix(frame: Frame) -> bytes:
    """Return what goes before a frame."""
    return _LENGTH.pack(len(frame))


async def drain(
    writer: ByteWriter, deadline: float, last: float, last_read_at: Callable[[], float] = lambda: float("-inf")
) -> None:
    """Wait until there is room again.

    Raises:
        TimeoutError: nothing was read by the deadline, or later for `STALL_SECONDS`, or there is none at `last`.
    """
    if writer.has_room():
        return  # the common case, without a timer
    loop = asyncio.get_running_loop()
    left, read_at = writer.transport.get_write_buffer_size(), last_read_at()
    until = max(deadline, min(loop.time() + STALL_SECONDS, last))  # who began late had no time to show that it reads
    while True:
        try:
            async with asyncio.timeout_at(until):
                return await writer.drain()
        except TimeoutError:
            now_left = writer.transport.get_write_buffer_size()
            if (now_left >= left and last_read_at() <= read_at) or loop.time() >= last:
                raise
            read_at = last_read_at()
            left, until = now_left, min(loop.time() + STALL_SECONDS, last)
