"""Hours and days are read as people write them, and anything else is refused with an example."""

from __future__ import annotations

import pytest

from p2p_diloco.config.settings import parse_days, parse_hours
from p2p_diloco.errors import ConfigError


@pytest.mark.parametrize(("text", "minutes"), [("22:00-07:00", 540), ("08:30 - 17:00", 510), ("00:00-23:59", 1439)])
def test_hours_have_a_length_and_may_cross_midnight(text: str, minutes: int) -> None:
    hours = parse_hours(text, "hours")
    assert hours.minutes == minutes
    assert str(hours) == text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "22-7", "22:00", "24:00-07:00", "22:60-07:00", "07:00-07:00", "2:00-07:00"])
def test_other_hours_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^hours is '.*'; expected two different times .* such as 22:00-07:00$"):
        parse_hours(text, "hours")


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("sat,sun", "sat,sun"),
        ("Sun, Sat", "sat,sun"),
        ("mon-fri", "mon,tue,wed,thu,fri"),
        ("fri-mon", "mon,fri,sat,sun"),
        ("mon", "mon"),
    ],
)
def test_days_are_names_and_ranges(text: str, days: str) -> None:
    assert str(parse_days(text, "days")) == days


@pytest.mark.parametrize("text", ["", "weekend", "sat;sun", "mon-", "1,2"])
def test_other_days_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^days is '.*'; expected days of the week \(mon, .*\), such as sat,sun"):
        parse_days(text, "days")
