"""Enforce a bandwidth cap: senders and readers of bulk frames wait here, control frames are only counted.

All links share the cap. Bytes pass in the order of requests, one piece at a time, so that one peer's megabytes delay
another's by at most a piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from p2p_diloco.transport.rate_limit import MOST_PIECE_BYTES, TokenBucket, burst_bytes, piece_bytes, wire_bytes


class Pace:
    """A cap on one direction, in bytes per second on the wire; None: no cap at present, so nothing waits.

    Attributes:
        turn: lock held while writing a frame. Frames are sent one after the other: it is better if most arrive by their
            deadline and the last ones late than if all arrive late.
        piece_bytes: maximum bytes written or read at once.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.turn = asyncio.Lock()
        self.piece_bytes = MOST_PIECE_BYTES
        self._bucket: TokenBucket | None = None
        self.set_rate(bytes_per_second)

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Change the cap. Bytes already booked keep their time; the rest of a frame passes under the new cap."""
        if bytes_per_second is None:
            self.piece_bytes, self._bucket = MOST_PIECE_BYTES, None
            return
        self.piece_bytes, burst = piece_bytes(bytes_per_second), burst_bytes(bytes_per_second)
        if self._bucket is None:
            self._bucket = TokenBucket(per_second=bytes_per_second, burst=burst)
        else:
            self._bucket.per_second, self._bucket.burst = bytes_per_second, burst

    @property
    def is_capped(self) -> bool:
        """Whether there is a cap at present."""
        return self._bucket is not None

    def count(self, num_bytes: int) -> float:
        """Book a frame; return the loop time from which it may pass."""
        now = asyncio.get_running_loop().time()
        return now if self._bucket is None else self._bucket.spend(wire_bytes(num_bytes, num_frames=1), now)

    async def wait_for(self, num_bytes: int) -> None:
        """Wait until a piece of a frame may pass."""
        if self._bucket is None:
            return
        now = asyncio.get_running_loop().time()
        at = self._bucket.spend(wire_bytes(num_bytes), now)
        if at > now:
            await asyncio.sleep(at - now)

    def debt_bytes(self) -> float:
        """Return the bytes booked ahead of the current time."""
        return 0.0 if self._bucket is None else self._bucket.debt(asyncio.get_running_loop().time())


def book_frame(paces: Iterable[Pace | None], num_bytes: int) -> float:
    """Book a frame under several optional caps; return the loop time at which it may have passed all of them."""
    return max((pace.count(num_bytes) for pace in paces if pace is not None), default=0.0)
