"""Whether a peer may run follows from the time, the owner's request, the battery and the traffic of the month."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.config.settings import parse_days, parse_hours
from p2p_diloco.guest.pause_rule import (
    MOST_RESERVED,
    PauseRules,
    Reason,
    Situation,
    Verdict,
    is_scheduled,
    judge,
    month_of,
    next_scheduled,
)


def local(*parts: int) -> datetime:
    """Return a local time without a zone, as the rules use it."""
    return datetime(*parts)  # type: ignore[arg-type, misc]  # noqa: DTZ001


NIGHT = PauseRules(hours=parse_hours("22:00-07:00", "hours"))
WEEKEND = PauseRules(days=parse_days("sat,sun", "days"))
WEEKEND_NIGHTS = PauseRules(hours=NIGHT.hours, days=WEEKEND.days)
THURSDAY = local(2026, 11, 26)


def at(clock: str, day: int = 26) -> Situation:
    return Situation(now=datetime.fromisoformat(f"2026-11-{day:02d}T{clock}"))


@pytest.mark.parametrize(
    ("rules", "situation", "sentence"),
    [
        (PauseRules(), at("12:00"), ""),
        (NIGHT, at("21:59"), "paused until 22:00 (hours)"),
        (NIGHT, at("22:00"), ""),
        (NIGHT, at("06:59"), ""),
        (NIGHT, at("07:00"), "paused until 22:00 (hours)"),
        (WEEKEND, at("12:00", day=26), "paused until sat 00:00 (days)"),
        (WEEKEND, at("00:00", day=28), ""),
        (WEEKEND, at("23:59", day=29), ""),
        (WEEKEND, at("00:00", day=30), "paused until sat 00:00 (days)"),
        (WEEKEND_NIGHTS, at("02:00", day=28), "paused until 22:00 (hours)"),
        (WEEKEND_NIGHTS, at("23:00", day=29), ""),
        (WEEKEND_NIGHTS, at("06:00", day=30), ""),
        (WEEKEND_NIGHTS, at("07:00", day=30), "paused until sat 22:00 (days)"),
    ],
)
def test_hours_and_days_decide_and_a_night_belongs_to_the_day_on_which_it_begins(
    rules: PauseRules, situation: Situation, sentence: str
) -> None:
    assert judge(rules, situation).sentence(situation.now) == sentence


def test_the_owner_pauses_until_resume_or_for_a_while() -> None:
    noon = at("12:00").now
    assert judge(PauseRules(), Situation(now=noon, requested=True)).sentence(noon) == "paused until resume (asked)"
    requested = Situation(now=noon, requested=True, requested_until=noon + timedelta(hours=2))
    assert judge(PauseRules(), requested).sentence(noon) == "paused until 14:00 (asked)"
    assert not judge(PauseRules(), replace(requested, now=noon + timedelta(hours=2))).is_paused


def test_a_pause_of_days_names_the_day_and_one_of_weeks_the_date() -> None:
    rules = PauseRules(monthly_quota=1e9)
    for day, sentence in ((26, "paused until tue 00:00 (monthly quota)"), (5, "paused until 2026-12-01 00:00")):
        seen = Situation(now=local(2026, 11, day, 10), month_bytes=1e9)
        assert judge(rules, seen).sentence(seen.now).startswith(sentence)


def test_the_battery_pauses_only_if_the_owner_wants_it() -> None:
    seen = replace(at("12:00"), on_battery=True)
    assert not judge(PauseRules(), seen).is_paused
    verdict = judge(PauseRules(pauses_on_battery=True), seen)
    assert (verdict.reason, verdict.until, verdict.is_online) == (Reason.BATTERY, None, True)
    assert verdict.sentence(seen.now) == "paused (battery)"


def test_a_spent_quota_takes_the_peer_offline_until_the_next_month() -> None:
    rules, seen = PauseRules(monthly_quota=500e9), replace(at("12:00"), month_bytes=499e9)
    assert not judge(rules, seen).is_paused
    busy = replace(seen, bytes_per_second=100e6)
    spent = judge(rules, busy)
    assert spent == Verdict(reason=Reason.QUOTA, until=local(2026, 12, 1))
    assert not spent.is_online
    assert judge(rules, seen, spent) == spent, "without traffic there is nothing to reserve, yet it stays offline"
    assert not judge(rules, Situation(now=local(2026, 12, 1)), spent).is_paused
    assert not judge(PauseRules(monthly_quota=600e9), seen, spent).is_paused, "the owner has raised it"


@given(
    used=st.floats(0, 2e12),
    rate=st.floats(0, 1e12),
    quota=st.floats(1e6, 1e12),
    was_spent=st.booleans(),
)
def test_a_quota_leaves_at_most_a_twentieth_unused(used: float, rate: float, quota: float, was_spent: bool) -> None:
    before = Verdict(reason=Reason.QUOTA) if was_spent else Verdict()
    seen = replace(at("12:00"), month_bytes=used, bytes_per_second=rate)
    is_online = judge(PauseRules(monthly_quota=quota), seen, before).is_online
    if used >= quota:
        assert not is_online
    if used < (1.0 - MOST_RESERVED) * quota * (1 - 1e-9):
        assert is_online


def test_several_limits_are_named_one_at_a_time() -> None:
    rules = PauseRules(hours=NIGHT.hours, pauses_on_battery=True, monthly_quota=1e9)
    seen = replace(at("12:00"), on_battery=True, requested=True, month_bytes=1e9)
    reasons = []
    for change in ({"month_bytes": 0.0}, {"requested": False}, {"now": at("23:00").now}, {"on_battery": False}):
        reasons.append(judge(rules, seen).reason)
        seen = replace(seen, **change)
    assert reasons == [Reason.QUOTA, Reason.REQUESTED, Reason.HOURS, Reason.BATTERY]
    assert judge(rules, seen).reason is None


@given(
    minutes=st.integers(0, 7 * 24 * 60),
    begin=st.integers(0, 1439),
    end=st.integers(0, 1439),
    days=st.sets(st.integers(0, 6), min_size=1),
)
def test_the_end_of_a_pause_is_the_first_moment_at_which_the_peer_may_run(
    minutes: int, begin: int, end: int, days: set[int]
) -> None:
    if begin == end:
        end = (begin + 1) % 1440
    hours = parse_hours("-".join(f"{part // 60:02d}:{part % 60:02d}" for part in (begin, end)), "hours")
    chosen = parse_days(",".join(("mon", "tue", "wed", "thu", "fri", "sat", "sun")[day] for day in days), "days")
    now = THURSDAY + timedelta(minutes=minutes)
    until = next_scheduled(now, hours, chosen)
    assert until is not None
    assert until > now
    assert is_scheduled(until, hours, chosen)
    if not is_scheduled(now, hours, chosen):
        between = range(0, int((until - now).total_seconds()) // 60, 17)
        assert not any(is_scheduled(now + timedelta(minutes=gone), hours, chosen) for gone in between)


def test_months_are_those_of_the_calendar() -> None:
    assert [month_of(local(2026, month, 1)) for month in (1, 12)] == ["2026-01", "2026-12"]
    for day in (local(2026, 1, 31, 23), local(2026, 12, 31, 23), local(2028, 2, 29)):
        until = judge(PauseRules(monthly_quota=1e6), Situation(now=day, month_bytes=1e6)).until
        assert until is not None
        assert (until.day, until.hour) == (1, 0)
        assert month_of(until) != month_of(day)
        assert month_of(until - timedelta(seconds=1)) == month_of(day)
