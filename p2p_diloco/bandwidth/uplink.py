"""Measure one peer's connection, adapt this peer's share of the work to it, and report the traffic to expect."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from p2p_diloco.bandwidth.forecast import Forecast, Notice, cap_notices, forecast, traffic_notice
from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.round.traffic import USABLE_SHARE, share_carried
from p2p_diloco.protocol.wire.member import EQUAL_SHARE, FULL_SHARE
from p2p_diloco.rate import format_rate
from p2p_diloco.transport.link import TransportCounters, TransportLimits
from p2p_diloco.transport.rate_limit import wire_bytes

WINDOW_SECONDS = 10.0
CHANGE_WORTH_SAYING = 1.1
MOST_FORECASTS = 64
RATE_CHANGE_WORTH_SAYING = 1.5
"""The measured rate is reported again once it has changed by this factor."""
FULL_SECONDS = 3.0
"""Minimum time that an uplink must be saturated to count, and maximum time between two looks."""
REMEMBERED_ROUNDS, MOST_REMEMBERED_ROUNDS = 16, 64
"""Time for which a saturated uplink counts as slow; then everything is sent again, to probe whether it still is.

If it is, the time doubles: during a probe, entries of the spans that this peer averages arrive late.
"""
GROWTH, MOST_GROWTH = 1.2, 1.5
"""Factor by which a peer that averages nothing tries more in the first round after saturation; in each later round the
factor is `GROWTH` times as large, up to the second number. A rate is too low if it was measured while a connection
began, or while packets were sent again. Others wait for late vectors until the middle of a round, no longer."""
TRIED_ROUNDS = 4
"""During a probe, the share of averaging stays unchanged for this many rounds."""
JUDGED_ROUNDS = 4
"""The rate is taken from this many of the latest saturated rounds, since an uplink may become slower."""


class UplinkWatch:
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
        averages = engine.me.trains and engine.conditions.can_be_dialled and engine.book.in_force is not None
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
        alive = engine.membership.liveness.alive(now)
        dialable = {member.peer: member.reduces for member in roster.members if member.trains}
        has_bootstrap = not all(member.trains for member in roster.members)
        dialable |= {peer: beat.can_be_dialled for peer, beat in alive.items()}
        dialable = {peer: can for peer, can in dialable.items() if peer not in alive or alive[peer].trains}
        dialable[me.peer] = can = engine.conditions.can_be_dialled
        # Alone it has no traffic: forecast for when one more peer, which can be dialled, has joined.
        alone = len(dialable) == 1 and not has_bootstrap
        case = (len(dialable) + alone, sum(dialable.values()) + alone, can, has_bootstrap, share)
        if case not in self._forecasts:
            if len(self._forecasts) >= MOST_FORECASTS:
                self._forecasts.clear()
            members, reachable, *_ = case
            self._forecasts[case] = forecast(
                engine.rules,
                members=members,
                reachable=reachable,
                is_reachable=can,
                has_bootstrap=has_bootstrap,
                share=share,
            )
        return self._forecasts[case]

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


class _Reading(NamedTuple):
    at: float
    num_bytes: float


class LineRate:
    """Measures the rate from the bytes that other peers have read, about once a second.

    The rate is that of vectors in the best stretch of a saturated uplink. Bytes sent would mislead: daemons and
    operating systems buffer megabytes before the uplink has carried them. Peers that do not read make vectors wait
    like a slow uplink does; the rate is then what the other peers read in that stretch.
    """

    def __init__(self) -> None:
        self._looked_at = self._read_at = float("-inf")
        self._full_since: float | None = None
        self._readings: deque[_Reading] = deque()
        self._best: dict[int, float] = {}
        self._round = 0
        self._rounds_since_full = 0
        self._remembered = REMEMBERED_ROUNDS
        self._tried_at: int | None = None
        self._before: float | None = None

    def look(self, now: float, round_index: int, bytes_read: float, read_at: float, *, is_waiting: bool) -> None:
        """Record one observation.

        Args:
            now: monotonic seconds.
            round_index: the current round.
            bytes_read: bytes read by others so far, as counted on the wire.
            read_at: time of their last acknowledgement, on the same clock. Vectors are long and arrive one at a time,
                so the time between two acknowledgements counts, not the time between two looks.
            is_waiting: whether vectors wait to be sent.
        """
        slept = now - self._looked_at > FULL_SECONDS  # or was too busy to look, so it is unknown what waited meanwhile
        self._looked_at = now
        self._rounds_since_full += round_index != self._round
        if not is_waiting or slept:
            self._full_since = None
            self._readings.clear()
        elif self._full_since is None:
            self._full_since = now
        if self._full_since is not None and read_at > max(self._full_since, self._read_at):
            self._readings.append(_Reading(read_at, bytes_read))
            self._judge(round_index)
        self._read_at = max(read_at, self._read_at)
        self._round = round_index
        self._remember()

    def _remember(self) -> None:
        """Forget old rounds; probe less and less often while the uplink stays slow."""
        known = self.bytes_per_second()
        full_in = [seen for seen in sorted(self._best) if seen > self._round - self._remembered][-JUDGED_ROUNDS:]
        self._best = {seen: self._best[seen] for seen in full_in}
        if known is not None and not full_in:
            self._tried_at, self._before = self._round, known
        elif self._tried_at is not None and full_in:
            self._tried_at, self._remembered = None, min(2 * self._remembered, MOST_REMEMBERED_ROUNDS)
        elif self._tried_at is not None and self._round >= self._tried_at + REMEMBERED_ROUNDS:
            self._tried_at, self._remembered = None, REMEMBERED_ROUNDS

    def _judge(self, round_index: int) -> None:
        """Take the rate of the shortest stretch up to now that is long enough, if there is one."""
        last = self._readings[-1]
        while len(self._readings) > 1 and self._readings[1].at <= last.at - FULL_SECONDS:
            self._readings.popleft()
        first = self._readings[0]
        if last.at - first.at >= FULL_SECONDS:
            rate = (last.num_bytes - first.num_bytes) / (last.at - first.at)
            self._best[round_index] = max(rate, self._best.get(round_index, 0.0))
            self._rounds_since_full = 0

    def bytes_per_second(self) -> float | None:
        """Return the rate of the uplink; None if it was not saturated recently."""
        return max(self._best.values(), default=None)

    def bytes_per_second_to_try(self) -> float | None:
        """Return the rate to try where this peer averages nothing: ever higher until it is saturated again."""
        known = self.bytes_per_second()
        if known is None:
            return None
        return known * math.prod(min(GROWTH**number, MOST_GROWTH) for number in range(1, self._rounds_since_full + 1))

    def bytes_per_second_to_share(self) -> float | None:
        """Return the rate that sets the share of averaging; during the first rounds of a probe, the rate before it.

        Late entries delay all peers, late contributions only this one.
        """
        is_tried = self._tried_at is not None and self._round < self._tried_at + TRIED_ROUNDS
        return self._before if is_tried else self.bytes_per_second()
