"""Rate limits: token buckets, and the bandwidth cap at which frames wait.

A bucket is arithmetic: given an amount and the time, it returns when the amount may pass. Bandwidth caps apply to bytes
on the wire. We count bytes of our streams, so each count is increased by the overhead of libp2p's yamux and encryption,
TCP and IP. The measurement is in docs/reference/bandwidth.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from p2p_diloco.rate import WIRE_SHARE

KIB = 1024
WIRE_BYTES_PER_FRAME = 100
"""Additional overhead of a small frame: its own packet, record and stream headers."""
BURST_SECONDS = 0.1
PIECE_SECONDS = 0.05
ROUNDING_SECONDS = 1e-6
MOST_BUCKETS = 4096
LEAST_BURST_BYTES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 * KIB, 4 * KIB, 64 * KIB

Key = TypeVar("Key", bound=Hashable)


class Rate(NamedTuple):
    """A rate per second, and a burst after a pause."""

    per_second: float
    burst: float


class TokenBucket:
    """A token bucket with rate `per_second` and capacity `burst`. A state machine; the time is an argument.

    In any interval of t seconds, at most `burst + per_second * t` pass. With constant demand, the rate is fully used.
    """

    __slots__ = ("_burst", "_paid_at", "_per_second")

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._paid_at = float("-inf")

    def set_rate(self, *, per_second: float, burst: float) -> None:
        """Change the rate; what is booked keeps its time."""
        self._per_second, self._burst = per_second, burst

    def spend(self, amount: float, now: float) -> float:
        """Book an amount after all earlier ones; return the time from which it may pass, `now` or later."""
        saved_since = now - self._burst / self._per_second
        self._paid_at = max(self._paid_at, saved_since) + amount / self._per_second
        return max(self._paid_at, now)

    def has_one(self, now: float) -> bool:
        """Return whether one more may pass immediately."""
        begin = max(self._paid_at, now - self._burst / self._per_second)
        return begin + 1.0 / self._per_second <= now + ROUNDING_SECONDS

    def admits(self, now: float) -> bool:
        """Book one and return True if it may pass immediately; otherwise book nothing."""
        if not self.has_one(now):
            return False
        self.spend(1.0, now)
        return True

    def is_full(self, now: float) -> bool:
        """Return whether the bucket is full, so that it equals a new one."""
        return self._paid_at <= now - self._burst / self._per_second

    def debt(self, now: float) -> float:
        return max(self._paid_at - now, 0.0) * self._per_second


class Buckets(Generic[Key]):
    """Token buckets by key, a bounded number of them: a full bucket equals a new one and is forgotten first."""

    def __init__(self) -> None:
        self._buckets: dict[Key, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Key, now: float, rate: Rate) -> TokenBucket | None:
        """Return the bucket of `key`, a new one if there is none; None if there is no room for it."""
        if key not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
            self._buckets = {each: bucket for each, bucket in self._buckets.items() if not bucket.is_full(now)}
            if len(self._buckets) >= MOST_BUCKETS:
                return None
        if key not in self._buckets:
            self._buckets[key] = TokenBucket(per_second=rate.per_second, burst=rate.burst)
        return self._buckets[key]


def spend_if_all(buckets: Collection[TokenBucket], now: float, amount: float = 1.0) -> bool:
    """Book an amount in each bucket if one more may pass each immediately; otherwise book nothing in any."""
    may_pass = all(bucket.has_one(now) for bucket in buckets)
    for bucket in buckets if may_pass else ():
        bucket.spend(amount, now)
    return may_pass


def burst_bytes(bytes_per_second: float) -> float:
    """Return the burst size for this cap; large enough that coarse timers do not reduce the rate."""
    return max(BURST_SECONDS * bytes_per_second, LEAST_BURST_BYTES)


def piece_bytes(bytes_per_second: float) -> int:
    """Return the size of pieces for writing and reading long frames under this cap."""
    return int(min(max(PIECE_SECONDS * bytes_per_second, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))


def wire_bytes(num_bytes: int, *, num_frames: int = 0) -> float:
    """Convert bytes of our streams to bytes on the wire, with the overhead of `num_frames` small frames."""
    return WIRE_SHARE * num_bytes + WIRE_BYTES_PER_FRAME * num_frames


class Pace:
    """A cap on one direction, in bytes per second on the wire; None: no cap at present, so nothing waits.

    All links share it. Bulk frames wait here, control frames are only counted. Bytes pass in the order of requests, one
    piece at a time, so that one peer's megabytes delay another's by at most a piece.

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
            self._bucket.set_rate(per_second=bytes_per_second, burst=burst)

    @property
    def is_capped(self) -> bool:
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
        return 0.0 if self._bucket is None else self._bucket.debt(asyncio.get_running_loop().time())
