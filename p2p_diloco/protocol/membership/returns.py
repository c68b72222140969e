"""The time that a dropped member waits before it is listed again: twice as long each time."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import PeerId

FIRST_WAIT_SECONDS = 20.0
LONGEST_WAIT_SECONDS = 600.0
"""Longest wait. A member that was listed for as long before it was dropped waits as short as at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    incarnation: int
    seconds: float
    until: float


class Returns:
    """The members that were dropped and did not leave.

    Each roster costs all members a part of a round. So a member whose line or machine is too slow for this run must not
    be listed and dropped in turn. A restarted peer has a new incarnation and does not wait.
    """

    def __init__(self) -> None:
        self._waits: dict[PeerId, _Wait] = {}

    def dropped(self, peer: PeerId, incarnation: int, listed_seconds: float, now: float) -> None:
        """Note that a member was dropped after it had been listed for so long."""
        self._waits = {p: wait for p, wait in self._waits.items() if wait.until + LONGEST_WAIT_SECONDS > now}
        last = self._waits.get(peer)
        seconds = FIRST_WAIT_SECONDS
        if last is not None and last.incarnation == incarnation and listed_seconds < LONGEST_WAIT_SECONDS:
            seconds = min(2.0 * last.seconds, LONGEST_WAIT_SECONDS)
        self._waits[peer] = _Wait(incarnation=incarnation, seconds=seconds, until=now + seconds)

    def wait_seconds(self, peer: PeerId, incarnation: int, now: float) -> float:
        """Return for how long a peer must still wait; 0 if it may be listed."""
        wait = self._waits.get(peer)
        if wait is None or wait.incarnation != incarnation:
            return 0.0
        return min(max(wait.until - now, 0.0), wait.seconds)
