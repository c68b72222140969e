"""A cap as arithmetic: an amount in, the moment from which it may pass out. The clock is an argument.

Caps on a line are on what it carries. We count bytes of our streams, so each count is raised by what the way adds:
libp2p's yamux and its encryption, TCP and IP. docs/reference/bandwidth.md has the measurement.
"""

from __future__ import annotations

KIB = 1024
WIRE_SHARE = 1.045
"""Bytes on an Ethernet line for each byte of a long stream."""
WIRE_BYTES_PER_FRAME = 100
"""What a small frame costs besides: packet, record and stream headers of its own."""
BURST_SECONDS = 0.1
PIECE_SECONDS = 0.05
ROUNDING_SECONDS = 1e-6
LEAST_BURST_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * KIB, 4 * KIB, 64 * KIB


class TokenBucket:
    """Lets `per_second` pass, of bytes or of whatever is counted, and at once what was saved up, at most `burst`.

    Whatever is asked for: in any stretch of t seconds no more than `burst + per_second * t` pass, and a line that
    always has something to pass is never idle. A state machine.
    """

    __slots__ = ("_paid_at", "burst", "per_second")

    def __init__(self, *, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = burst
        self._paid_at = float("-inf")

    def spend(self, amount: float, now: float) -> float:
        """Book an amount after all that was booked before; return from when on it may pass, `now` or later."""
        saved_since = now - self.burst / self.per_second
        self._paid_at = max(self._paid_at, saved_since) + amount / self.per_second
        return max(self._paid_at, now)

    def has_one(self, now: float) -> bool:
        """Return whether one more may pass at once."""
        begin = max(self._paid_at, now - self.burst / self.per_second)
        return begin + 1.0 / self.per_second <= now + ROUNDING_SECONDS

    def admits(self, now: float) -> bool:
        """Book one and return True, if it may pass at once; else book nothing."""
        if not self.has_one(now):
            return False
        self.spend(1.0, now)
        return True

    def is_full(self, now: float) -> bool:
        """Return whether all is saved up that may be, so that a new bucket would do as well."""
        return self._paid_at <= now - self.burst / self.per_second

    def debt(self, now: float) -> float:
        """Return how much of what was booked may not have passed yet."""
        return max(self._paid_at - now, 0.0) * self.per_second


def burst_bytes(bytes_per_second: float) -> float:
    """Return how much a line under this cap may carry at once; timers are coarse, and nothing may be lost to that."""
    return max(BURST_SECONDS * bytes_per_second, LEAST_BURST_BYTES)


def piece_bytes(bytes_per_second: float) -> int:
    """Return the size of the pieces in which long frames are written and read under this cap."""
    return int(min(max(PIECE_SECONDS * bytes_per_second, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))


def wire_bytes(num_bytes: int, *, num_frames: int = 0) -> float:
    """Return what bytes of our streams are on the line; each small frame counts by itself."""
    return WIRE_SHARE * num_bytes + WIRE_BYTES_PER_FRAME * num_frames
