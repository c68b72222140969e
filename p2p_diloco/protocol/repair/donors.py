"""Learns about donors: how large their pieces may be, which fell silent, and which to avoid.

A value that learns; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.wire.messages import MOST_PIECE_BYTES

FIRST_PIECE_BYTES = 1 << 16
"""Small, so that progress shows on thin lines: what counts there is that pieces come, not how soon all have."""
QUICK_SECONDS, SLOW_SECONDS = 0.5, 2.0
"""Pieces that come sooner may be twice as long, those that come later are halved: what waits in a line, entries and
signs of life too, waits for a whole piece."""
SHUN_SECONDS = 60.0
TIMES_USUAL = 8.0
"""A donor that has answered, and then answers nothing for so many times as long as it took, has probably stopped."""
WEIGHT_OF_LATEST = 0.25


class Donors:
    """Those that spans are fetched from.

    Args:
        quiet_seconds: how long a donor may answer nothing while others do; longer where its answers take longer.
    """

    def __init__(self, *, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._piece_bytes: dict[PeerId, int] = {}
        self._usual_seconds: dict[PeerId, float] = {}
        self._heard_at: dict[PeerId, float] = {}
        self._shunned: dict[PeerId, float] = {}
        self._looked_at = float("-inf")

    def piece_bytes(self, donor: PeerId) -> int:
        """Return how long the next piece of a donor may be."""
        return self._piece_bytes.get(donor, FIRST_PIECE_BYTES)

    def answered(self, donor: PeerId, asked_bytes: int, came_bytes: int, took_seconds: float) -> None:
        """Learn from a piece how long the next ones should be.

        One that was asked for before the last lesson teaches nothing, nor does a short one that comes quickly.
        """
        usual = self._usual_seconds.get(donor, took_seconds)
        self._usual_seconds[donor] = usual + WEIGHT_OF_LATEST * (took_seconds - usual)
        size = self.piece_bytes(donor)
        if took_seconds > SLOW_SECONDS and asked_bytes <= size:
            self._piece_bytes[donor] = max(asked_bytes // 2, FIRST_PIECE_BYTES)
        elif took_seconds < QUICK_SECONDS and came_bytes >= size:
            self._piece_bytes[donor] = min(2 * size, MOST_PIECE_BYTES)

    def heard(self, donor: PeerId, now: float) -> None:
        """Note that a donor has answered something."""
        self._heard_at[donor] = now

    def look(self, now: float) -> None:
        """Continue; called often. After a pause, silence says nothing about a donor: nobody was heard meanwhile."""
        if now - self._looked_at > self._quiet_seconds:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._looked_at = now

    def is_quiet(self, donor: PeerId, asked_at: float, others: Collection[PeerId], now: float) -> bool:
        """Return whether a donor that used to answer has stopped since it was asked, while others answer.

        One that has never answered may have a thin line; how long that may take is for others to say.
        """
        if donor not in self._usual_seconds:
            return False
        since = max(asked_at, self._heard_at.get(donor, asked_at))
        patience = max(self._quiet_seconds, TIMES_USUAL * self._usual_seconds[donor])
        return now - since > patience and any(self._heard_at.get(other, since) > since for other in others)

    def sound(self, donors: Sequence[PeerId], now: float) -> Sequence[PeerId]:
        """Return those that are not left alone; all when there are no others: some donor is better than none."""
        return [donor for donor in donors if self._shunned.get(donor, 0.0) <= now] or donors

    def shun(self, donor: PeerId, what: str, now: float) -> list[Action]:
        """Ask others before this donor for a while; said once in that time."""
        is_known = self._shunned.get(donor, 0.0) > now
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        self._shunned[donor] = now + SHUN_SECONDS
        text = f"{short_peer_id(donor)} {what}; asking others first for {SHUN_SECONDS:.0f} s"
        return [] if is_known else [Report(topic="donor", text=text)]

    def lose(self, donor: PeerId) -> None:
        """Forget what was learnt of a donor whose link is gone; whoever calls again has another line."""
        for learnt in (self._piece_bytes, self._usual_seconds, self._heard_at):
            learnt.pop(donor, None)
