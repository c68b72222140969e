"""A connection as a stream of bytes, whose long reads go from the socket straight to where they are wanted.

asyncio's StreamReader gathers what comes in a buffer and copies each read out of it; of a frame of some hundred
kilobytes that is two copies more than are needed, and a pause and a resumption of the socket on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from p2p_diloco.memory.slabs import FEWEST_BYTES, passing_bytes

AHEAD_BYTES = 16 * 1024
"""Of what comes unasked: lengths, small frames, the beginning of a long one."""
FIRST_BYTES = 1024 * 1024 + 4096
"""Memory for a long read is taken at once up to this, and then as its bytes come: the other end only says how many.

A piece of state, 1 MiB and what is said of it, comes within it; memory that grows is copied."""


class ByteReader(Protocol):
    """What is read from a connection."""

    @property
    def bytes_received(self) -> int:
        """What has come so far, read or not."""
        ...

    async def readexactly(self, n: int, /) -> bytes | bytearray | memoryview:
        """Return `n` bytes; IncompleteReadError at an earlier end."""
        ...

    async def read(self, n: int, /) -> bytes:
        """Return up to `n` bytes, none at the end."""
        ...


class ByteWriter(Protocol):
    """What is written to a connection."""

    @property
    def transport(self) -> Any:
        """The connection itself."""
        ...

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send `data`, soon."""
        ...

    def write_eof(self) -> None:
        """Say that nothing more will be written."""
        ...

    def has_room(self) -> bool:
        """Return whether `drain` would return at once."""
        ...

    async def drain(self) -> None:
        """Wait until there is room for more; ConnectionError when nobody will read it."""
        ...


class ByteStream(asyncio.BufferedProtocol):
    """Both ends of one connection, for one task that reads and one that writes.

    Args:
        connected: told of this stream once it is open.
    """

    transport: asyncio.Transport

    def __init__(self, connected: Callable[[ByteStream], None] = lambda stream: None) -> None:
        self._connected = connected
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self.bytes_received = 0
        self._begin = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._is_over = False
        self._is_paused = False
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._is_lost = False

    # -- what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hear that the connection is open."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none, but do all that one does
        self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes go."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        return self._ahead[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Hear that so many bytes have come."""
        self.bytes_received += nbytes
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None  # what follows may come before the task that reads goes on
                self._wake_reader()
            return
        self._end += nbytes
        if self._end == AHEAD_BYTES:
            self._make_room()
        self._wake_reader()

    def eof_received(self) -> bool:
        """Hear that the other end has said all; this one may go on writing."""
        self._is_over = True
        self._wake_reader()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Hear that the connection is gone."""
        self._is_over = self._is_lost = True
        self._error = exc
        self._room.set()
        self._wake_reader()

    def pause_writing(self) -> None:
        """Hear that more is buffered than should be."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Hear that there is room again."""
        self._room.set()

    # -- reading

    async def readexactly(self, n: int, /) -> bytes | bytearray | memoryview:
        """Return `n` bytes; those of a long read lie in memory of their own.

        What a long read has taken is lost when it is cancelled: then the stream is of no use any more.

        Raises:
            asyncio.IncompleteReadError: the stream ended before.
            OSError: the connection broke.
        """
        if n > AHEAD_BYTES:
            return await self._read_long(n)
        while self._end - self._begin < n:
            if self._is_over:
                raise self._incomplete(self._take(n), n)
            await self._wait()
        return self._take(n)

    async def read(self, n: int, /) -> bytes:
        """Return what has come, up to `n` bytes, or wait for it; nothing at the end."""
        while self._begin == self._end and not self._is_over:
            await self._wait()
        return self._take(n)

    async def _read_long(self, n: int) -> bytearray | memoryview:
        if FEWEST_BYTES <= n <= FIRST_BYTES:
            # Not on the heap: an entry stays for a cycle, in the place of a gradient that was gone for a moment.
            own = passing_bytes(n)
            await self._fill(own, 0, n)
            return own
        found = bytearray(min(n, FIRST_BYTES))
        at = 0
        while True:
            at = await self._fill(found, at, n)
            if at == n:
                return found
            found += bytes(min(len(found), n - len(found)))

    async def _fill(self, found: bytearray | memoryview, at: int, n: int) -> int:
        """Fill `found` from `at` on; return its length."""
        with memoryview(found) as whole:
            held = min(self._end - self._begin, len(found) - at)
            whole[at : at + held] = self._ahead[self._begin : self._begin + held]
            self._skip(held)
            try:
                with whole[at + held :] as target:
                    self._target, self._filled = target if len(target) else None, 0
                    while self._target is not None:
                        if self._is_over:
                            raise self._incomplete(bytes(whole[: at + held + self._filled]), n)
                        await self._wait()
            finally:
                self._target = None
        return len(found)

    def _take(self, n: int) -> bytes:
        """Return up to `n` of the bytes that came unasked."""
        taken = bytes(self._ahead[self._begin : min(self._begin + n, self._end)])
        self._skip(len(taken))
        return taken

    def _skip(self, num_bytes: int) -> None:
        self._begin += num_bytes
        if self._is_paused and not self._is_lost:
            self._make_room()

    def _make_room(self) -> None:
        """Move what nobody has read to the front; where it fills all, let the other end wait."""
        held = bytes(self._ahead[self._begin : self._end])
        self._begin, self._end = 0, len(held)
        self._ahead[: len(held)] = held
        is_full = len(held) == AHEAD_BYTES
        if is_full != self._is_paused:
            self._is_paused = is_full
            (self.transport.pause_reading if is_full else self.transport.resume_reading)()

    async def _wait(self) -> None:
        assert self._reader is None, "one task reads"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _incomplete(self, partial: bytes, n: int) -> BaseException:
        return self._error if self._error is not None else asyncio.IncompleteReadError(partial, n)

    # -- writing

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send `data`, soon; it must not change any more.

        Raises:
            OSError: the connection is lost; what a loop's own transport says then differs from loop to loop.
        """
        self._check_not_lost()
        self.transport.write(data)

    def write_eof(self) -> None:
        """Say that nothing more will be written.

        Raises:
            OSError: the connection is lost.
        """
        self._check_not_lost()
        self.transport.write_eof()

    def has_room(self) -> bool:
        """Return whether `drain` would return at once."""
        return self._room.is_set() and not self._is_lost and not self.transport.is_closing()

    async def drain(self) -> None:
        """Wait until there is room for more.

        Raises:
            OSError: nobody will read it.
        """
        if self.transport.is_closing():
            await asyncio.sleep(0)  # or who writes on and on would never hear that it is lost
        if not self._room.is_set():
            await self._room.wait()
        self._check_not_lost()

    def _check_not_lost(self) -> None:
        if self._is_lost:
            raise self._error if isinstance(self._error, OSError) else ConnectionResetError("the connection is lost")
