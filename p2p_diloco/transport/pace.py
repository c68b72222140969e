"""Enforce a bandwidth cap: senders and readers of bulk frames wait here, control frames are only counted.

All links share the cap. Bytes pass in the order of requests, one piece at a time, so that one peer's megabytes delay
another's by at most a piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from p2p_diloco.transport.rate_limit import TokenBucket, burst_bytes, piece_bytes, wire_bytes


class Pace:
    """A cap on one direction, in bytes per second on the wire.

    Attributes:
        turn: lock held while writing a frame. Frames are sent one after the other: it is better if most arrive by their
            deadline and the last ones late than if all arrive late.
        piece_bytes: maximum bytes written or read at once.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.turn = asyncio.Lock()
        self.piece_bytes = piece_bytes(bytes_per_second)
        self._bucket = TokenBucket(per_second=bytes_per_second, burst=burst_bytes(bytes_per_second))

    def count(self, num_bytes: int) -> float:
        """Book a frame; return the loop time from which it may pass."""
        return self._bucket.spend(wire_bytes(num_bytes, num_frames=1), asyncio.get_running_loop().time())

    async def wait_for(self, num_bytes: int) -> None:
        """Wait until a piece of a frame may pass."""
        now = asyncio.get_running_loop().time()
        at = self._bucket.spend(wire_bytes(num_bytes), now)
        if at > now:
            await asyncio.sleep(at - now)

    def debt_bytes(self) -> float:
        """Return the bytes booked ahead of the current time."""
        return self._bucket.debt(asyncio.get_running_loop().time())


def book_frame(paces: Iterable[Pace | None], num_bytes: int) -> float:
    """Book a frame under several optional caps; return the loop time at which it may have passed all of them."""
    return max((pace.count(num_bytes) for pace in paces if pace is not None), default=0.0)
