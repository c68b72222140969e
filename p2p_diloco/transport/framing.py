"""Frames on a stream of bytes: u32 length, then that many bytes. Reads and writes both end in bounded time.

A length of zero is the greeting, sent once by either end of a new stream. It proves that the other *process* reads,
not only its daemon: a stopped peer's daemon goes on taking streams.
"""

from __future__ import annotations

import asyncio
import struct

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Lane, TransportLimits, frame_too_long

STALL_SECONDS = 5.0
"""After its deadline a frame whose reader goes on may take longer; one that is not read for so long may not."""
_LENGTH = struct.Struct(">I")
_GREETING = _LENGTH.pack(0)
_ONE_WRITE_BYTES = 64 * 1024


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
    reader: asyncio.StreamReader, *, sender: PeerId, lane: Lane, limits: TransportLimits
) -> bytes | None:
    """Return the next frame, or None when the stream ended between frames. Waits for a length as long as it takes.

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
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None
    longest = limits.frame_bytes(lane)
    if not 0 < length <= longest:
        raise FrameError(frame_too_long(sender, lane, length, longest))
    seconds = limits.frame_seconds + length / limits.slowest_bytes_per_second
    try:
        async with asyncio.timeout(seconds):
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        came = len(error.partial)
        raise FrameError(f"{name} sent {came} of {length} bytes of a {lane.value} frame and was gone") from None
    except TimeoutError:
        raise PeerError(f"{name} did not finish a {lane.value} frame of {length} bytes in {seconds:.1f} s") from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


async def write_frame(
    writer: asyncio.StreamWriter, frame: bytes, *, receiver: PeerId, lane: Lane, deadline: float
) -> None:
    """Write one frame by `deadline` (loop time), or as long as the other end goes on reading: its line may be thin.

    Raises:
        PeerError: the stream broke, or the other end does not read; what was written so far spoils the stream.
    """
    name = short_peer_id(receiver)
    try:
        if len(frame) < _ONE_WRITE_BYTES:
            writer.write(_LENGTH.pack(len(frame)) + frame)
        else:
            writer.write(_LENGTH.pack(len(frame)))
            writer.write(frame)
        await _drain(writer, deadline)
    except TimeoutError:
        raise PeerError(f"{name} did not read a {lane.value} frame by its deadline") from None
    except OSError as error:
        raise PeerError(f"the connection to {name} broke: {error.strerror or error}") from None


async def _drain(writer: asyncio.StreamWriter, deadline: float) -> None:
    """Wait until there is room again.

    Raises:
        TimeoutError: nothing was read by the deadline, or later for `STALL_SECONDS`.
    """
    loop = asyncio.get_running_loop()
    left = writer.transport.get_write_buffer_size()
    until = deadline
    while True:
        try:
            async with asyncio.timeout_at(until):
                return await writer.drain()
        except TimeoutError:
            now_left = writer.transport.get_write_buffer_size()
            if now_left >= left:
                raise
            left, until = now_left, loop.time() + STALL_SECONDS
