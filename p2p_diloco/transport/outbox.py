"""The queue of frames to be written on one lane of one link: bounded in bytes, each frame with a deadline."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2p_diloco.transport.link import Frame, LaneCounters


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
        """Bytes of all queued frames."""
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
