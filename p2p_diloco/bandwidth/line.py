"""Measure one peer's connection, adapt this peer's share of the work to it, and report the traffic to expect."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from p2p_diloco.bandwidth.forecast import Forecast, Notice, cap_notices, forecast, traffic_notice
from p2p_diloco.bandwidth.line_rate import LineRate
from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.round.demand import USABLE_SHARE, share_carried
from p2p_diloco.protocol.wire.member import EQUAL_SHARE, FULL_SHARE
from p2p_diloco.rate import format_rate
from p2p_diloco.transport.link import TransportCounters, TransportLimits
from p2p_diloco.transport.rate_limit import wire_bytes

WINDOW_SECONDS = 10.0
CHANGE_WORTH_SAYING = 1.1
MOST_FORECASTS = 64
RATE_CHANGE_WORTH_SAYING = 1.5
"""The measured rate is reported again once it has changed by this factor."""


class LineWatch:
    """Watches the caps and counters of a transport.

    Args:
        limits: caps of the transport.
        counters: counters of the transport, updated while it works.
        waiting_bytes: returns the bytes of vectors to a peer whose write has not begun.
        seconds: returns the monotonic time of the transport's loop.
    """

    def __init__(
        self,
        limits: TransportLimits,
        counters: TransportCounters,
        waiting_bytes: Callable[[PeerId], int] = lambda peer: 0,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counters = counters
        self._waiting_bytes = waiting_bytes
        self._seconds = seconds
        self._samples: deque[tuple[float, float, float]] = deque()
        self._published_bytes: float | None = None
        self._reported_rate: float | None = None
        self._rate = LineRate()
        self._forecasts: dict[tuple[int, int, bool, bool, float], Forecast] = {}

    def follow(self, limits: TransportLimits) -> list[Notice]:
        """Take over changed caps; return the notices to report.

        What the line has shown under the old caps is forgotten: it may have been the cap.
        """
        before, self.limits = self.limits, limits
        notices: list[Notice] = []
        for name, old, new in (
            ("upload", before.upload_bytes_per_second, limits.upload_bytes_per_second),
            ("download", before.download_bytes_per_second, limits.download_bytes_per_second),
        ):
            if old != new:
                text = (
                    f"{name} is no longer capped" if new is None else f"{name} is now capped at {format_rate(8 * new)}"
                )
                notices.append(Notice(topic="cap", text=text, figures={}))
        if notices:
            self._rate, self._reported_rate, self._published_bytes = LineRate(), None, None
        return notices

    def steer(self, engine: PeerEngine, now: float) -> list[Notice]:
        """Adapt what this peer averages and contributes to its connection; return the notices to report.

        Call about once a second.

        Args:
            now: swarm seconds.
        """
        return [*self._set_share(engine, now), *self._set_upload(engine), *self.notices(engine, now)]

    def _set_share(self, engine: PeerEngine, now: float) -> list[Notice]:
        share = self.share(engine, now)
        if share == engine.conditions.share:
            return []
        engine.set_conditions(replace(engine.conditions, share=share))
        if share == FULL_SHARE:
            text = "this peer's connection can carry a full share of averaging again"
        else:
            part = f"{share / EQUAL_SHARE:g} of an equal share of averaging"
            text = f"this peer's connection carries {part}; faster connections average more"
        return [Notice(topic="share", text=text, figures={"averaging_share": share / EQUAL_SHARE})]

    def _set_upload(self, engine: PeerEngine) -> list[Notice]:
        """Set the upload budget of contributions: spans that would arrive late are not sent."""
        grid = engine.book.grid()
        averages = grid is None or grid.share_of(engine.me.peer) > 0.0
        rate = self.upload_bytes_per_second(averages=averages)
        engine.set_conditions(replace(engine.conditions, upload_bytes_per_second=rate))
        before, shown = self._reported_rate, self.shown
        if shown is None and before is None:
            return []
        if (
            shown is not None
            and before is not None
            and 1.0 / RATE_CHANGE_WORTH_SAYING <= shown / before <= RATE_CHANGE_WORTH_SAYING
        ):
            return []
        self._reported_rate = shown
        if shown is None:
            return [Notice(topic="line", text="upload no longer saturated; sending all spans again", figures={})]
        text = f"upload saturated at about {format_rate(8 * shown)}; sending only the spans that fit"
        return [Notice(topic="line", text=text, figures={"upload_shown": 8 * shown})]

    def share(self, engine: PeerEngine, now: float) -> int:
        """Return the share of averaging that the connection carries, from its caps and its measured rate.

        Call about once a second.

        Args:
            now: swarm seconds.
        """
        bulk, is_full = self.counters.bulk, self._is_full(engine)
        round_index = engine.rules.clock.round_at(now)
        self._rate.look(
            self._seconds(), round_index, wire_bytes(bulk.bytes_read), bulk.last_read_at, is_waiting=is_full
        )
        up, down = self.limits.upload_bytes_per_second, self.limits.download_bytes_per_second
        known = [USABLE_SHARE * up] if up is not None else []
        shown = self._beneath_cap(self._rate.bytes_per_second_to_share())
        known += [shown] if shown is not None else []
        averages = engine.me.trains and engine.membership.can_be_dialled and engine.book.in_force is not None
        if not averages or not (known or down):
            return FULL_SHARE
        return share_carried(
            self._expected(engine, now, 1.0).largest,
            engine.rules.clock.round_seconds,
            upload=min(known, default=None),
            download=USABLE_SHARE * down if down is not None else None,
        )

    @property
    def shown(self) -> float | None:
        """The measured upload rate for vectors, bytes per second; None if the uplink was not saturated recently.

        Also None if only the cap saturates it, which says nothing about the uplink itself.
        """
        return self._beneath_cap(self._rate.bytes_per_second())

    def _beneath_cap(self, shown: float | None) -> float | None:
        cap = self.limits.upload_bytes_per_second
        return None if shown is not None and cap is not None and shown >= USABLE_SHARE * cap else shown

    def upload_bytes_per_second(self, *, averages: bool = True) -> float | None:
        """Return the usable upload rate: the lower of the cap and the measured rate; None if neither is known.

        Args:
            averages: whether this peer averages for others. If not, it tries more than was measured, in each round.
        """
        shown = self.shown if averages else self._beneath_cap(self._rate.bytes_per_second_to_try())
        known = (self.limits.upload_bytes_per_second, shown)
        return min((rate for rate in known if rate is not None), default=None)

    def _is_full(self, engine: PeerEngine) -> bool:
        """Return whether vectors to most members wait, and to at least two: a single peer may just not be reading."""
        roster = engine.book.in_force
        linked = engine.linked & roster.peers() if roster is not None else ()
        waiting = sum(self._waiting_bytes(peer) > 0 for peer in linked)
        return waiting > 1 and 2 * waiting > len(linked)

    def notices(self, engine: PeerEngine, now: float) -> list[Notice]:
        """Return the traffic notices of a trainer that knows the roster: at first, and after changes.

        Args:
            now: swarm seconds.
        """
        if engine.book.in_force is None or not engine.me.trains:
            return []
        grid = engine.book.grid()
        dealt = grid.share_of(engine.me.peer) if grid is not None else 0.0
        expected = self._expected(engine, now, dealt or 1.0)  # a peer that is not on the roster yet will get a share
        moved = expected.cycle.sent + expected.cycle.received
        if self._published_bytes is not None and not _has_changed(self._published_bytes, moved):
            return []
        self._published_bytes = moved
        return [traffic_notice(expected), *cap_notices(expected, self.limits)]

    def _expected(self, engine: PeerEngine, now: float, share: float) -> Forecast:
        roster, me = engine.book.in_force, engine.me
        assert roster is not None, "asked before"
        alive = engine.membership.alive(now)
        dialable = {member.peer: member.reduces for member in roster.members if member.trains}
        has_bootstrap = not all(member.trains for member in roster.members)
        dialable |= {peer: beat.can_be_dialled for peer, beat in alive.items()}
        dialable = {peer: can for peer, can in dialable.items() if peer not in alive or alive[peer].trains}
        dialable[me.peer] = can = engine.membership.can_be_dialled
        # Alone it has no traffic: forecast for when one more peer, which can be dialled, has joined.
        alone = len(dialable) == 1 and not has_bootstrap
        question = (len(dialable) + alone, sum(dialable.values()) + alone, can, has_bootstrap, share)
        if question not in self._forecasts:
            if len(self._forecasts) >= MOST_FORECASTS:
                self._forecasts.clear()
            members, reachable, *_ = question
            self._forecasts[question] = forecast(
                engine.rules,
                members=members,
                reachable=reachable,
                is_reachable=can,
                has_bootstrap=has_bootstrap,
                share=share,
            )
        return self._forecasts[question]

    def rates(self, now: float) -> tuple[float, float]:
        """Return the recent rates up and down, in bits per second on the wire.

        Call about once a second.

        Args:
            now: seconds of any clock.
        """
        up = down = 0.0
        for lane in (self.counters.control, self.counters.bulk):
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
