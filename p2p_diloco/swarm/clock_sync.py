"""Swarm time: the local clock plus the median offset to the peers' raw clocks."""

from __future__ import annotations

from collections.abc import Callable

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.clock import median_offset

LONGEST_ROUND_TRIP_SECONDS = 5.0
LASTING_BEATS = 8
"""An offset is good for some heartbeats: clocks drift slowly, and asking all at each would be most of the talk."""


class SwarmClock:
    """Asks peers for their raw clocks and keeps the median; `now` may be called from any thread.

    Args:
        raw: this machine's clock, in Unix seconds.
    """

    def __init__(self, raw: Callable[[], float]) -> None:
        self.raw = raw
        self._offset = 0.0
        self._offsets: dict[PeerId, float] = {}
        self._asked: dict[tuple[PeerId, int], float] = {}
        self._heard_at: dict[PeerId, float] = {}
        self._nonce = 0

    def now(self) -> float:
        """Return swarm seconds."""
        return self.raw() + self._offset

    @property
    def offset_seconds(self) -> float:
        """What is added to the local clock."""
        return self._offset

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
        """Take an answer; one that took long, or during which this clock was set, says too little."""
        asked_at = self._asked.pop((peer, nonce), None)
        now = self.raw()
        if asked_at is None or not 0.0 <= now - asked_at <= LONGEST_ROUND_TRIP_SECONDS:
            return
        self._heard_at[peer] = now
        self._offsets[peer] = clock_seconds - (asked_at + now) / 2
        self._offset = median_offset(list(self._offsets.values()))

    def forget(self, peer: PeerId) -> None:
        """Let a peer that is gone have no say."""
        self._offsets.pop(peer, None)
        self._heard_at.pop(peer, None)
        self._asked = {key: at for key, at in self._asked.items() if key[0] != peer}
        self._offset = median_offset(list(self._offsets.values()))
