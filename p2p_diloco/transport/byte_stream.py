"""A connection as a byte stream, with long reads directly from the socket into their target buffer.

asyncio's StreamReader collects incoming bytes in a buffer and copies each read out of it. For a frame of some hundred
kilobytes, that is two unnecessary copies, and a pause and resumption of the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from p2p_diloco.memory.slabs import FEWEST_BYTES, passing_bytes

AHEAD_BYTES = 16 * 1024
"""Size of the buffer for bytes that no read has requested yet: lengths, small frames, the beginning of a long one."""
WRITE_BUFFER_BYTES = 256 * 1024
"""Maximum bytes of one stream buffered for the daemon; beyond that, `drain` waits."""
FIRST_BYTES = 1024 * 1024 + 4096
"""Memory for a long read is allocated at once up to this size, then as its bytes arrive: the length is untrusted.

A piece of state, 1 MiB plus its header, fits within it; growing memory would have to be copied."""


class ByteStream(asyncio.BufferedProtocol):
    """Both directions of one connection, for one reading and one writing task.

    Args:
        connected: called with this stream once it is open.
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

    # -- callbacks of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transports are not subclasses, but have the same methods
        self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        return self._ahead[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None  # more bytes may arrive before the reading task continues
                self._wake_reader()
            return
        self._end += nbytes
        if self._end == AHEAD_BYTES:
            self._make_room()
        self._wake_reader()

    def eof_received(self) -> bool:
        """Called when the other end has half-closed; this end may continue to write."""
        self._is_over = True
        self._wake_reader()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_over = self._is_lost = True
        self._error = exc
        self._room.set()
        self._wake_reader()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    # -- reading

    async def readexactly(self, n: int, /) -> bytes | bytearray | memoryview:
        """Return `n` bytes; a long read returns newly allocated memory.

        If a long read is cancelled, its bytes are lost and the stream is unusable.

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
        """Return up to `n` received bytes, waiting for at least one; nothing at the end."""
        while self._begin == self._end and not self._is_over:
            await self._wait()
        return self._take(n)

    async def peek(self, n: int, /) -> bytes:
        """Return the next few bytes, `n` or what is left at the end of the stream, without taking them."""
        while self._end - self._begin < n and not self._is_over:
            await self._wait()
        return bytes(self._ahead[self._begin : min(self._begin + n, self._end)])

    async def _read_long(self, n: int) -> bytearray | memoryview:
        if FEWEST_BYTES <= n <= FIRST_BYTES:
            # Not on the heap: an entry stays for a cycle and would take the place of a gradient freed for a moment.
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
        """Fill `found` from `at` to its end; return its length."""
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
        """Return up to `n` bytes from the read-ahead buffer."""
        taken = bytes(self._ahead[self._begin : min(self._begin + n, self._end)])
        self._skip(len(taken))
        return taken

    def _skip(self, num_bytes: int) -> None:
        self._begin += num_bytes
        if self._is_paused and not self._is_lost:
            self._make_room()

    def _make_room(self) -> None:
        """Move unread bytes to the front; if they fill the buffer, pause reading."""
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
        """Queue `data` for sending; it must not change afterwards.

        Raises:
            OSError: the connection is lost; the transports of different loops would raise different errors.
        """
        self._check_not_lost()
        self.transport.write(data)

    def write_eof(self) -> None:
        """Half-close: nothing more will be written.

        Raises:
            OSError: the connection is lost.
        """
        self._check_not_lost()
        self.transport.write_eof()

    def limit_buffer(self) -> None:
        """Have `drain` wait from `WRITE_BUFFER_BYTES` on."""
        if not self.transport.is_closing():  # uvloop raises if the other end is already gone
            self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def unsent_bytes(self) -> int:
        """Return the number of buffered bytes that the connection has not taken yet."""
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        self.transport.abort()

    def has_room(self) -> bool:
        """Return whether `drain` would return immediately."""
        return self._room.is_set() and not self._is_lost and not self.transport.is_closing()

    async def drain(self) -> None:
        """Wait until there is room for more.

        Raises:
            OSError: the connection is lost.
        """
        if self.transport.is_closing():
            await asyncio.sleep(0)  # otherwise a busy writer would never notice the loss
        if not self._room.is_set():
            await self._room.wait()
        self._check_not_lost()

    def _check_not_lost(self) -> None:
        if self._is_lost:
            raise self._error if isinstance(self._error, OSError) else ConnectionResetError("the connection is lost")
