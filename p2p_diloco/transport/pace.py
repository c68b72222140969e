"""A cap on a line at work: who would send or read bulk frames waits here, control frames are only counted.

All links share the line. Bytes are let pass in the order in which they were asked for, a piece at a time, so that one
peer's megabytes hold another's by a piece and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from p2p_diloco.transport.rate_limit import TokenBucket, burst_bytes, piece_bytes, wire_bytes


class Pace:
    """One direction of a line under a cap, in bytes per second on the wire.

    Attributes:
        turn: held by who writes a frame. Frames go out one after the other: that most of them come by their deadline
            and the last ones late is better than that all come late.
        piece_bytes: most that is written or read at once.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.turn = asyncio.Lock()
        self.piece_bytes = piece_bytes(bytes_per_second)
        self._bucket = TokenBucket(per_second=bytes_per_second, burst=burst_bytes(bytes_per_second))

    def count(self, num_bytes: int) -> float:
        """Book a frame; return from which loop time on it may pass, for those that wait."""
        return self._bucket.spend(wire_bytes(num_bytes, num_frames=1), asyncio.get_running_loop().time())

    async def wait_for(self, num_bytes: int) -> None:
        """Wait until a piece of a frame may pass."""
        now = asyncio.get_running_loop().time()
        at = self._bucket.spend(wire_bytes(num_bytes), now)
        if at > now:
            await asyncio.sleep(at - now)

    def debt_bytes(self) -> float:
        """Return how many bytes were booked that may not have passed yet."""
        return self._bucket.debt(asyncio.get_running_loop().time())


def book_frame(paces: Iterable[Pace | None], num_bytes: int) -> float:
    """Book a frame on lines that may have caps; return the loop time from which it may have passed all of them."""
    return max((pace.count(num_bytes) for pace in paces if pace is not None), default=0.0)
