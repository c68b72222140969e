"""How much of what was sent on one lane may be under way, that is, not yet read by the other end.

The queues of a line lie out of sight: the daemon and the system take a megabyte for each link, which a thin line
carries only in many seconds. A vector that waits there comes late whatever its deadline, and so does all that follows
it, heartbeats and clocks included. So who is written to says what it has read, and no more is under way than comes
within a moment: a window that grows while what fills it comes at once, and shrinks when that takes longer (by delay and
not by loss, as TCP Vegas).
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
"""Longer than a peer is silent that trains with all of its cores, and short beside a round of half a minute."""
AT_ONCE_SECONDS = 0.5
"""What comes within this shows that the line would carry more: longer than the way to any place on Earth and back, but
by a satellite far out, whose links keep the first window. Between the two the window stays: no to and fro."""


class Sent(NamedTuple):
    """A frame that is under way.

    Attributes:
        at: seconds; when its write began.
        deadline: seconds; until when somebody wants it.
        num_bytes: of it.
        with_all_before: bytes that were under way once it was sent: when it is read, so much has come since.
    """

    at: float
    deadline: float
    num_bytes: int
    with_all_before: int


class FlightWindow:
    """The window of one lane. A state machine; the clock is an argument, in seconds that nobody sets.

    Attributes:
        window_bytes: what may be under way; a longer frame goes when nothing else does.
        bytes_under_way: what is.
        last_read_at: seconds; when the other end said last that it had read something.
    """

    __slots__ = ("_frames", "_read_of_first", "bytes_under_way", "last_read_at", "window_bytes")

    def __init__(self) -> None:
        self.window_bytes = float(FIRST_BYTES)
        self.bytes_under_way = 0
        self._frames: deque[Sent] = deque()
        self._read_of_first = 0
        self.last_read_at = float("-inf")

    @property
    def oldest(self) -> Sent | None:
        """The frame that was sent first of those under way."""
        return self._frames[0] if self._frames else None

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a frame of so many bytes may be sent."""
        return not self._frames or self.bytes_under_way + num_bytes <= self.window_bytes

    def send(self, num_bytes: int, now: float, deadline: float) -> None:
        """Note that a frame is being sent."""
        self.bytes_under_way += num_bytes
        self._frames.append(Sent(now, deadline, num_bytes, self.bytes_under_way))

    def read(self, num_bytes: int, now: float) -> int:
        """Hear that the other end has read so many bytes more, in the order in which they were sent.

        Returns:
            how many of them were under way: it may say more than it was sent.
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

    def _learn(self, sent: Sent, now: float) -> None:
        """Double by what filled the window and came at once; shrink to what comes in a moment, as a late one shows."""
        seconds = now - sent.at
        if seconds <= AT_ONCE_SECONDS:
            if 2 * sent.with_all_before > self.window_bytes:
                self.window_bytes = min(self.window_bytes + sent.num_bytes, MOST_BYTES)
        elif seconds > MOMENT_SECONDS:
            come = sent.with_all_before * MOMENT_SECONDS / seconds
            self.window_bytes = min(self.window_bytes, max(come, FEWEST_BYTES))

    def lose(self) -> None:
        """Hear that what is under way will not be read: its stream is gone, and another carries the lane."""
        self._frames.clear()
        self.bytes_under_way = self._read_of_first = 0
