"""Swarm time: the local clock plus the median offset to the members' clocks.

Only members of the roster in force are asked, and only they count; strangers in any number move nothing. Who is no
member takes the members' time as it is; once it is a member, its own clock, set so, is one voice among theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.clock import median_offset

LONGEST_ROUND_TRIP_SECONDS = 5.0
LASTING_BEATS = 8
"""An offset is good for some heartbeats: clocks drift slowly, and asking all at each would be most of the talk."""
LATEST_SECONDS = 1e11
"""No clock is taken seriously that shows a time before 1970 or after this one, some three thousand years from now."""
SLOWEST = 0.5
"""Swarm time that is ahead goes at this speed until it is right again: it never steps back while a peer takes part."""


def steady_unix_seconds() -> Callable[[], float]:
    """Return a clock that shows Unix time now and is never set again: a change of the wall clock does not reach it.

    It goes on while the machine sleeps, as far as the system has such a clock.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    start = time.time() - time.clock_gettime(clock)
    return lambda: start + time.clock_gettime(clock)


class SwarmClock:
    """Asks members for their clocks and keeps the median; `now` may be called from any thread.

    Args:
        raw: this machine's clock, in Unix seconds.
    """

    def __init__(self, raw: Callable[[], float]) -> None:
        self.raw = raw
        self._base = 0.0
        self._offset = 0.0
        self._offsets: dict[PeerId, float] = {}
        self._asked: dict[tuple[PeerId, int], float] = {}
        self._heard_at: dict[PeerId, float] = {}
        self._nonce = 0
        self._voices: frozenset[PeerId] = frozenset()
        self._is_voice = True
        self._takes_part = False
        self._last: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def own(self) -> float:
        """Return this peer's own clock, as it is told to others: set once, when it joins, and free-running since."""
        return self.raw() + self._base

    def now(self) -> float:
        """Return swarm seconds; they never step back once this peer takes part in the run."""
        with self._lock:
            raw = self.raw()
            now = raw + self._base + self._offset
            if self._last is not None and self._takes_part:
                last_raw, last = self._last
                now = max(now, last + SLOWEST * max(raw - last_raw, 0.0))
            self._last = (raw, now)
            return now

    @property
    def offset_seconds(self) -> float:
        """What is added to the local clock."""
        return self._base + self._offset

    def listen_to(self, voices: Collection[PeerId], *, is_voice: bool, takes_part: bool) -> None:
        """Let the clocks of these peers count from now on, and no others.

        Args:
            is_voice: whether the own clock counts among them: this peer is a member.
            takes_part: whether it is one since it started. From then on its time never steps back.
        """
        self._voices = frozenset(voices)
        self._takes_part = self._takes_part or takes_part
        if self._is_voice and not is_voice:
            self._set_own(self._offset)
        self._is_voice = is_voice
        # Who begins to count is asked again: what it said before, its own clock may not have been set by the swarm.
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if peer in self._voices}
        self._offsets = {peer: offset for peer, offset in self._offsets.items() if peer in self._voices}
        self._correct()

    def counts(self, peer: PeerId) -> bool:
        """Tell whether the clock of `peer` counts here."""
        return peer in self._voices

    def is_due(self, peer: PeerId, heartbeat_seconds: float) -> bool:
        """Tell whether to ask `peer`: it never answered, long ago, or this clock was set back since."""
        age = self.raw() - self._heard_at.get(peer, float("-inf"))
        return not 0.0 <= age < LASTING_BEATS * heartbeat_seconds

    def ask(self, peer: PeerId) -> int:
        """Return the nonce of a new question to `peer`; its answer counts from now."""
        self._nonce += 1
        self._asked = {key: at for key, at in self._asked.items() if key[0] != peer}
        self._asked[peer, self._nonce] = self.raw()
        return self._nonce

    def hear(self, peer: PeerId, nonce: int, clock_seconds: float) -> None:
        """Take an answer of a peer that counts; one that took long, or across a change of this clock, says too little.

        A time that no clock shows says nothing at all: not a number, or thousands of years away.
        """
        asked_at = self._asked.pop((peer, nonce), None)
        now = self.raw()
        if asked_at is None or not 0.0 <= now - asked_at <= LONGEST_ROUND_TRIP_SECONDS:
            return
        if peer not in self._voices or not 0.0 <= clock_seconds <= LATEST_SECONDS:
            return
        self._heard_at[peer] = now
        self._offsets[peer] = clock_seconds - ((asked_at + now) / 2 + self._base)
        self._correct()

    def forget(self, peer: PeerId) -> None:
        """Let a peer that is gone have no say."""
        self._offsets.pop(peer, None)
        self._heard_at.pop(peer, None)
        self._asked = {key: at for key, at in self._asked.items() if key[0] != peer}
        self._correct()

    def _correct(self) -> None:
        """Follow the median: with the own clock as one voice of it, or by setting the own clock where it is none."""
        if self._is_voice:
            self._offset = median_offset(list(self._offsets.values()))
        elif self._offsets:
            self._set_own(median_offset(list(self._offsets.values()), own_counts=False))

    def _set_own(self, by_seconds: float) -> None:
        with self._lock:
            self._base += by_seconds
            self._offset = 0.0
        self._offsets = {peer: offset - by_seconds for peer, offset in self._offsets.items()}
