"""A flow-control window: how many bytes of one lane may be in flight, that is, sent but not yet read.

The buffers below us are invisible: the daemon and the system buffer a megabyte per link, which a slow connection needs
many seconds to send. A vector waiting there is late regardless of its deadline, and so is everything after it,
including heartbeats and clock messages. So the receiver acknowledges what it has read, and the window limits the bytes
in flight to what arrives within a moment, beyond twice the time that the quickest frame took: that is the way there and
back, and once more for lost packets. It grows while full windows arrive quickly, and shrinks when they take longer
(based on delay, not loss, as in TCP Vegas).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KIB = 1024
MIB = 1024 * KIB
FIRST_BYTES = 256 * KIB
FEWEST_BYTES = 64 * KIB
MOST_BYTES = 64 * MIB
MOMENT_SECONDS = 1.0
"""Longer than a peer that trains on all cores stays silent, and short compared with a round of half a minute."""
AT_ONCE_SECONDS = 0.5
"""An acknowledgement within this time, beyond the ways, shows that the connection could carry more. Between the two
times the window stays, to avoid oscillation."""
LONGEST_WAY_SECONDS = 0.8
"""A quickest frame that took longer has waited in a thin line. Two homes on different continents are half a second from
each other, there and back, each with its own line."""
WAYS = 2.0
"""Number of ways that a frame may take: a lost packet is sent again after another one, and what follows it waits."""


class WriteInFlight(NamedTuple):
    """A frame in flight.

    Attributes:
        at: start of its write, seconds.
        deadline: end of its usefulness, seconds.
        num_bytes: size of the frame.
        with_all_before: bytes in flight after it was sent; this many have arrived since then once it is read.
    """

    at: float
    deadline: float
    num_bytes: int
    with_all_before: int


class FlightWindow:
    """The window of one lane. A state machine; the time is an argument, in monotonic seconds.

    Attributes:
        window_bytes: maximum bytes in flight; a longer frame is sent when nothing else is in flight.
        bytes_under_way: bytes in flight.
        last_read_at: time of the last acknowledgement, seconds.
    """

    __slots__ = ("_frames", "_read_of_first", "_way_seconds", "bytes_under_way", "last_read_at", "window_bytes")

    def __init__(self) -> None:
        self.window_bytes = float(FIRST_BYTES)
        self.bytes_under_way = 0
        self._frames: deque[WriteInFlight] = deque()
        self._read_of_first = 0
        self._way_seconds = LONGEST_WAY_SECONDS
        self.last_read_at = float("-inf")

    @property
    def oldest(self) -> WriteInFlight | None:
        """The oldest frame in flight."""
        return self._frames[0] if self._frames else None

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a frame of `num_bytes` bytes may be sent."""
        return not self._frames or self.bytes_under_way + num_bytes <= self.window_bytes

    def send(self, num_bytes: int, now: float, deadline: float) -> None:
        """Record that a frame is being sent."""
        self.bytes_under_way += num_bytes
        self._frames.append(WriteInFlight(now, deadline, num_bytes, self.bytes_under_way))

    def read(self, num_bytes: int, now: float) -> int:
        """Record that the other end has read `num_bytes` more bytes, in the order in which they were sent.

        Returns:
            The number of them that were in flight: a peer may acknowledge more than it was sent.
        """
        known = min(num_bytes, self.bytes_under_way)
        if known:
            self.last_read_at = now
        self.bytes_under_way -= known
        self._read_of_first += known
        while self._frames and self._frames[0].num_bytes <= self._read_of_first:
            sent = self._frames.popleft()
            self._read_of_first -= sent.num_bytes
            self._learn(sent, now)
        return known

    def _learn(self, sent: WriteInFlight, now: float) -> None:
        """Grow (up to doubling) after a full window that arrived quickly; after a late frame, shrink to its rate."""
        seconds = now - sent.at
        self._way_seconds = min(self._way_seconds, seconds)
        ways_seconds = WAYS * self._way_seconds
        if seconds <= ways_seconds + AT_ONCE_SECONDS:
            if 2 * sent.with_all_before > self.window_bytes:
                self.window_bytes = min(self.window_bytes + sent.num_bytes, MOST_BYTES)
        elif seconds > ways_seconds + MOMENT_SECONDS:
            come = sent.with_all_before * (ways_seconds + MOMENT_SECONDS) / seconds
            self.window_bytes = min(self.window_bytes, max(come, FEWEST_BYTES))

    def lose(self) -> None:
        """Record that the bytes in flight are lost: their stream is gone, and another carries the lane."""
        self._frames.clear()
        self.bytes_under_way = self._read_of_first = 0
