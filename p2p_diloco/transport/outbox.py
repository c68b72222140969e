"""The frames of one lane of one link on their way: a queue of those to be written, and a window of those in flight.

The buffers below us are invisible: the daemon and the system buffer a megabyte per link, which a slow connection needs
many seconds to send. A vector waiting there is late regardless of its deadline, and so is everything after it,
including heartbeats and clock messages. So the receiver acknowledges what it has read, and the window limits the bytes
in flight to what arrives within a moment, beyond twice the time that the quickest frame took: that is the way there and
back, and once more for lost packets. It grows while full windows arrive quickly. When they take longer, it becomes what
arrives in that time at the best rate of the last seconds (based on delay and rate, not loss, as in TCP BBR).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2p_diloco.transport.link import KIB, MIB, Frame, LaneCounters

FIRST_BYTES = 256 * KIB
FEWEST_BYTES = 64 * KIB
MOST_BYTES = 64 * MIB
MOMENT_SECONDS = 1.0
"""Longer than a peer that trains on all cores stays silent, and short compared with a round of half a minute."""
SOON_SECONDS, LONGEST_MOMENT_SECONDS = 10.0, 2.0
"""For frames that are due soon, as the vectors of a short round are, a moment lasts until half of the time to their
deadline has passed, up to the longest moment: a lost packet costs more time there than what waits in the line. Frames
that are due later can wait here, and must not hold up others."""
AT_ONCE_SECONDS = 0.5
"""An acknowledgement within this time, beyond the ways, shows that the connection could carry more. Between the two
times the window grows to what arrives within a moment at the best rate, and no further, to avoid oscillation."""
LONGEST_WAY_SECONDS = 0.8
"""A quickest frame that took longer has waited in a thin line. Two homes on different continents are half a second from
each other, there and back, each with its own line."""
VERY_LATE_SECONDS = 6.0
"""A connection that has just begun, or been idle, takes a few seconds for its first frames if it loses packets."""
SHORTEST_SECONDS = 1e-3
REMEMBERED_SECONDS = 30.0
"""Time for which a measured rate counts. A lost packet delays all that follows it, and says nothing about the rate."""
WAYS = 2.0
"""Number of ways that a frame may take: a lost packet is sent again after another one, and what follows it waits."""


class PostedFrame(NamedTuple):
    """A frame and the loop time at which it expires."""

    frame: Frame
    deadline: float


class Outbox:
    """First in, first out; `offer` refuses frames beyond `max_bytes`, `take` skips expired ones."""

    __slots__ = ("_bytes", "_counters", "_frames", "_max_bytes")

    def __init__(self, max_bytes: int, counters: LaneCounters) -> None:
        self._frames: deque[PostedFrame] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._counters = counters

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    def offer(self, frame: Frame, deadline: float) -> bool:
        """Queue `frame`; return False if there is no room. An empty queue accepts any frame."""
        if self._frames and self._bytes + len(frame) > self._max_bytes:
            return False
        self._frames.append(PostedFrame(frame, deadline))
        self._add(len(frame))
        return True

    def take(self, now: float) -> PostedFrame | None:
        """Remove and return the first frame that has not expired; drop those before it."""
        posted = self.first(now)
        if posted is not None:
            self._remove_first()
        return posted

    def first(self, now: float) -> PostedFrame | None:
        """Return the first frame that has not expired, without removing it; drop those before it."""
        while self._frames:
            if self._frames[0].deadline >= now:
                return self._frames[0]
            self._remove_first()
            self._counters.count_dropped(1)
        return None

    def _remove_first(self) -> None:
        self._add(-len(self._frames.popleft().frame))

    def clear(self) -> None:
        """Drop all frames: the link is gone."""
        self._counters.count_dropped(len(self._frames))
        self._frames.clear()
        self._add(-self._bytes)

    def _add(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._counters.count_waiting(num_bytes)


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


def _moment_seconds(sent: WriteInFlight, ways_seconds: float) -> float:
    """Return how long after `ways_seconds` a frame may arrive and still be in time."""
    left_seconds = sent.deadline - sent.at
    if left_seconds > SOON_SECONDS:
        return MOMENT_SECONDS
    return min(max(left_seconds / 2.0 - ways_seconds, MOMENT_SECONDS), LONGEST_MOMENT_SECONDS)


class _Highest:
    """The highest value of the last seconds."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def note(self, value: float, now: float) -> float:
        """Note a value, and return the highest one of the last `REMEMBERED_SECONDS`."""
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - REMEMBERED_SECONDS:
            self._values.popleft()
        return self._values[0][1]


class FlightWindow:
    """The window of one lane. A state machine; the time is an argument, in monotonic seconds.

    Attributes:
        window_bytes: maximum bytes in flight; a longer frame is sent when nothing else is in flight.
        bytes_under_way: bytes in flight.
        last_read_at: time of the last acknowledgement, seconds.
    """

    __slots__ = (
        "_frames", "_most_under_way", "_rates", "_read_of_first", "_way_seconds", "bytes_under_way", "last_read_at",
        "window_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.window_bytes = float(FIRST_BYTES)
        self.bytes_under_way = 0
        self._frames: deque[WriteInFlight] = deque()
        self._read_of_first = 0
        self._rates, self._most_under_way = _Highest(), _Highest()
        self._way_seconds = LONGEST_WAY_SECONDS
        self.last_read_at = float("-inf")

    @property
    def oldest(self) -> WriteInFlight | None:
        return self._frames[0] if self._frames else None

    def has_room(self, num_bytes: int) -> bool:
        return not self._frames or self.bytes_under_way + num_bytes <= self.window_bytes

    def send(self, num_bytes: int, now: float, deadline: float) -> None:
        self.bytes_under_way += num_bytes
        self._frames.append(WriteInFlight(now, deadline, num_bytes, self.bytes_under_way))
        self._most_under_way.note(self.bytes_under_way, now)

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
        """Grow (up to doubling) after a full window that arrived quickly; otherwise adapt to the best rate.

        A window that was less than half full tells neither what the connection can carry nor its rate, unless it took
        very long. If it was late, the window shrinks to twice the most that was in flight lately: the next window of
        that size will count.
        """
        seconds = now - sent.at
        self._way_seconds = min(self._way_seconds, seconds)
        ways_seconds = WAYS * self._way_seconds
        due_seconds = ways_seconds + _moment_seconds(sent, ways_seconds)
        is_late = seconds > due_seconds
        if seconds >= VERY_LATE_SECONDS:  # what it carried before says nothing any more
            self._rates, self._most_under_way = _Highest(), _Highest()
        if is_late:
            self._shrink_to(2 * self._most_under_way.note(self.bytes_under_way, now))
        if 2 * sent.with_all_before < self.window_bytes and seconds < VERY_LATE_SECONDS:
            return
        best = self._rates.note(sent.with_all_before / max(seconds, SHORTEST_SECONDS), now)
        in_a_moment = best * due_seconds
        if is_late:
            self._shrink_to(in_a_moment)
        else:
            is_quick = seconds <= ways_seconds + AT_ONCE_SECONDS
            most = MOST_BYTES if is_quick else max(in_a_moment, self.window_bytes)
            self.window_bytes = min(self.window_bytes + sent.num_bytes, most)

    def _shrink_to(self, num_bytes: float) -> None:
        self.window_bytes = min(self.window_bytes, max(num_bytes, FEWEST_BYTES))

    def lose(self) -> None:
        """Record that the bytes in flight are lost: their stream is gone, and another carries the lane."""
        self._frames.clear()
        self.bytes_under_way = self._read_of_first = 0
