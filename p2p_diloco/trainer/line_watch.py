"""One peer's line: says once what the run will ask of it, again when that has changed, and measures what it carries."""

from __future__ import annotations

from collections import deque

from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.trainer.expected_traffic import Notice, cap_notices, forecast, traffic_notice
from p2p_diloco.transport.link import TransportCounters, TransportLimits
from p2p_diloco.transport.rate_limit import wire_bytes

WINDOW_SECONDS = 10.0
CHANGE_WORTH_SAYING = 1.25


class LineWatch:
    """Knows the caps and the counters of a transport.

    Args:
        limits: of the transport.
        counters: of the transport; they grow while it works.
    """

    def __init__(self, limits: TransportLimits, counters: TransportCounters) -> None:
        self.limits = limits
        self._counters = counters
        self._samples: deque[tuple[float, float, float]] = deque()
        self._said_bytes: float | None = None

    def notices(self, engine: PeerEngine, now: float) -> list[Notice]:
        """Return what is to be said now: of a training peer that knows who takes part, at first and after changes.

        Args:
            now: swarm seconds.
        """
        roster, me = engine.book.in_force, engine.me
        if roster is None or not me.trains:
            return []
        alive = engine.membership.alive(now)
        dialable = {member.peer: member.can_be_dialled for member in roster.members}
        dialable |= {peer: beat.can_be_dialled for peer, beat in alive.items()}
        dialable = {peer: can for peer, can in dialable.items() if peer not in alive or alive[peer].trains}
        dialable[me.peer] = me.can_be_dialled
        alone = len(dialable) == 1  # say how it will be when the next one comes, who can be dialled
        expected = forecast(
            engine.rules,
            members=len(dialable) + alone,
            reachable=sum(dialable.values()) + alone,
            is_reachable=me.can_be_dialled,
        )
        moved = expected.cycle.sent + expected.cycle.received
        if self._said_bytes is not None and not _has_changed(self._said_bytes, moved):
            return []
        self._said_bytes = moved
        return [traffic_notice(expected), *cap_notices(expected, self.limits)]

    def rates(self, now: float) -> tuple[float, float]:
        """Return bits per second on the wire, up and down, lately.

        Args:
            now: seconds of any clock; about one call a second.
        """
        up = down = 0.0
        for lane in (self._counters.control, self._counters.bulk):
            up += wire_bytes(lane.bytes_sent, num_frames=lane.frames_sent)
            down += wire_bytes(lane.bytes_received, num_frames=lane.frames_received)
        self._samples.append((now, up, down))
        while self._samples[0][0] < now - WINDOW_SECONDS:
            self._samples.popleft()
        began, up_then, down_then = self._samples[0]
        seconds = now - began
        if seconds <= 0.0:
            return 0.0, 0.0
        return 8 * (up - up_then) / seconds, 8 * (down - down_then) / seconds


def _has_changed(before: float, after: float) -> bool:
    return not before / CHANGE_WORTH_SAYING <= after <= before * CHANGE_WORTH_SAYING
