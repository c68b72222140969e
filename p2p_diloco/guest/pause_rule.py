"""Decide whether a peer may run now, and why not. Pure: the time, the counters and the sensors are arguments.

There are two kinds of pause. A peer that is paused by its owner, by the hour or by the battery makes no step, but
follows the run. A peer that has spent its quota of the month also leaves the network, because following costs traffic.

All times are local times without a zone, as on the wall clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta

from p2p_diloco.config.settings import DAY_MINUTES, DAY_NAMES, Days, Hours

LEAVE_SECONDS = 15.0
"""Time for which a peer may still send at its recent rate after it has decided to leave the network."""
MOST_RESERVED = 0.05
"""Maximum share of a quota that is reserved for leaving, and so may stay unused."""
_LOOKED_AHEAD_DAYS = 8


class Reason(enum.Enum):
    """Why a peer is paused."""

    QUOTA = "monthly quota"
    REQUESTED = "asked"
    HOURS = "hours"
    DAYS = "days"
    BATTERY = "battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRules:
    """The owner's limits; None: no limit.

    Attributes:
        monthly_quota: bytes sent and received in a calendar month.
    """

    hours: Hours | None = None
    days: Days | None = None
    pauses_on_battery: bool = False
    monthly_quota: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts at a moment.

    Attributes:
        now: local time.
        requested: whether the owner has requested a pause.
        requested_until: the end of that pause; None: until the owner resumes.
        on_battery: whether the machine runs on battery power.
        month_bytes: bytes sent and received this month.
        bytes_per_second: recent traffic, both ways.
    """

    now: datetime
    requested: bool = False
    requested_until: datetime | None = None
    on_battery: bool = False
    month_bytes: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a peer may run.

    Attributes:
        reason: why it is paused; None if it runs.
        until: when the pause ends; None if that is unknown.
    """

    reason: Reason | None = None
    until: datetime | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the peer makes no steps."""
        return self.reason is not None

    @property
    def is_online(self) -> bool:
        return self.reason is not Reason.QUOTA

    def sentence(self, now: datetime) -> str:
        """Return `paused until 22:00 (hours)`; empty if the peer runs."""
        if self.reason is None:
            return ""
        if self.until is not None:
            return f"paused until {_moment(self.until, now)} ({self.reason.value})"
        return "paused until resume (asked)" if self.reason is Reason.REQUESTED else f"paused ({self.reason.value})"


RUNS = Verdict()


def judge(rules: PauseRules, seen: Situation, before: Verdict = RUNS) -> Verdict:
    """Return the verdict; if several limits apply, the first of quota, owner, days and hours, battery.

    Args:
        before: the last verdict. A spent quota stays spent, although a peer that is offline has no traffic to reserve
            a part for.
    """
    if rules.monthly_quota is not None and _is_spent(rules.monthly_quota, seen, before):
        return Verdict(reason=Reason.QUOTA, until=next_month(seen.now))
    if seen.requested and (seen.requested_until is None or seen.now < seen.requested_until):
        return Verdict(reason=Reason.REQUESTED, until=seen.requested_until)
    if not is_scheduled(seen.now, rules.hours, rules.days):
        is_wrong_day = rules.days is not None and not is_scheduled(seen.now, None, rules.days)
        reason = Reason.DAYS if is_wrong_day or rules.hours is None else Reason.HOURS
        return Verdict(reason=reason, until=next_scheduled(seen.now, rules.hours, rules.days))
    if rules.pauses_on_battery and seen.on_battery:
        return Verdict(reason=Reason.BATTERY)
    return RUNS


def is_scheduled(now: datetime, hours: Hours | None, days: Days | None) -> bool:
    """Return whether a local time is within the hours and days; a night belongs to the day on which it begins."""
    minute = 60 * now.hour + now.minute
    into = (minute - hours.begin) % DAY_MINUTES if hours is not None else minute
    if hours is not None and into >= hours.minutes:
        return False
    begun_on = (now - timedelta(minutes=into)).weekday()
    return days is None or begun_on in days.numbers


def next_scheduled(now: datetime, hours: Hours | None, days: Days | None) -> datetime | None:
    """Return the next begin of the hours on one of the days after `now`; None without such a limit."""
    begin = hours.begin if hours is not None else 0
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    begins = (midnight + timedelta(days=day, minutes=begin) for day in range(_LOOKED_AHEAD_DAYS))
    return next((at for at in begins if at > now and is_scheduled(at, hours, days)), None)


def next_month(now: datetime) -> datetime:
    begin = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (begin + timedelta(days=32)).replace(day=1)


def month_of(now: datetime) -> str:
    """Return the name of a calendar month, such as 2026-11."""
    return f"{now.year:04d}-{now.month:02d}"


def _is_spent(quota: float, seen: Situation, before: Verdict) -> bool:
    if before.reason is Reason.QUOTA:
        return seen.month_bytes >= (1.0 - MOST_RESERVED) * quota
    reserved = min(LEAVE_SECONDS * seen.bytes_per_second, MOST_RESERVED * quota)
    return seen.month_bytes + reserved >= quota


def _moment(at: datetime, now: datetime) -> str:
    time = f"{at:%H:%M}"
    if at.date() == now.date() or at - now < timedelta(hours=12):
        return time
    if at - now < timedelta(days=7):
        return f"{DAY_NAMES[at.weekday()]} {time}"
    return f"{at:%Y-%m-%d} {time}"
