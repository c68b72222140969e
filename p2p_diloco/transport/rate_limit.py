"""A cap on a line as arithmetic: bytes in, the moment from which they may pass out. The clock is an argument.

Caps are on what the line carries. We count bytes of our streams, so each count is raised by what the way adds:
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
LEAST_BURST_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * KIB, 4 * KIB, 64 * KIB


class TokenBucket:
    """Lets `bytes_per_second` pass, and at once what was saved up, `burst_bytes` at most. A state machine.

    Whatever is asked for: in any stretch of t seconds no more than `burst_bytes + bytes_per_second * t` pass, and a
    line that always has something to pass is never idle.
    """

    __slots__ = ("_paid_at", "burst_bytes", "bytes_per_second")

    def __init__(self, *, bytes_per_second: float, burst_bytes: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.burst_bytes = burst_bytes
        self._paid_at = float("-inf")

    def spend(self, num_bytes: float, now: float) -> float:
        """Book bytes behind all that were booked before; return the moment from which they may pass, `now` or later."""
        saved_since = now - self.burst_bytes / self.bytes_per_second
        self._paid_at = max(self._paid_at, saved_since) + num_bytes / self.bytes_per_second
        return max(self._paid_at, now)

    def debt_bytes(self, now: float) -> float:
        """Return how many of the bytes booked may not have passed yet."""
        return max(self._paid_at - now, 0.0) * self.bytes_per_second


def burst_bytes(bytes_per_second: float) -> float:
    """Return how much a line under this cap may carry at once; timers are coarse, and nothing may be lost to that."""
    return max(BURST_SECONDS * bytes_per_second, LEAST_BURST_BYTES)


def piece_bytes(bytes_per_second: float) -> int:
    """Return the size of the pieces in which long frames are written and read under this cap."""
    return int(min(max(PIECE_SECONDS * bytes_per_second, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))


def wire_bytes(num_bytes: int, *, num_frames: int = 0) -> float:
    """Return what bytes of our streams are on the line; each small frame counts by itself."""
    return WIRE_SHARE * num_bytes + WIRE_BYTES_PER_FRAME * num_frames
