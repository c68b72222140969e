"""Hours of the day and days of the week in which a peer trains, such as `22:00-07:00` and `sat,sun`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError

DAY_MINUTES = 24 * 60
DAY_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = r"([01]\d|2[0-3]):([0-5]\d)"
_HOURS = re.compile(rf"{_TIME}-{_TIME}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """A part of every day, in minutes since midnight; it crosses midnight if it ends before it begins."""

    begin: int
    end: int

    def __str__(self) -> str:
        return "-".join(f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in (self.begin, self.end))

    @property
    def minutes(self) -> int:
        """Length in minutes."""
        return (self.end - self.begin) % DAY_MINUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Days:
    """Days of the week; Monday is 0."""

    numbers: frozenset[int]

    def __str__(self) -> str:
        return ",".join(DAY_NAMES[number] for number in sorted(self.numbers))


def parse_hours(text: str, name: str) -> Hours:
    """Parse `22:00-07:00`.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: these are not two different times.
    """
    found = _HOURS.fullmatch(text.replace(" ", ""))
    begin, end = (60 * int(found[place]) + int(found[place + 1]) for place in (1, 3)) if found else (0, 0)
    if begin == end:
        raise ConfigError(f"{name} is {text!r}; expected two different times of the day, such as 22:00-07:00")
    return Hours(begin=begin, end=end)


def parse_days(text: str, name: str) -> Days:
    """Parse `sat,sun` or `mon-fri`.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: a word is not a day.
    """
    try:
        numbers = frozenset(number for word in text.lower().replace(" ", "").split(",") for number in _days_of(word))
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}; expected days of the week ({', '.join(DAY_NAMES)}), such as sat,sun or mon-fri"
        ) from None
    return Days(numbers=numbers)


def _days_of(word: str) -> Iterator[int]:
    first, dash, last = word.partition("-")
    begin = DAY_NAMES.index(first)
    end = DAY_NAMES.index(last) if dash else begin
    for place in range((end - begin) % 7 + 1):
        yield (begin + place) % 7
