"""Parse and format numbers: rates like `20mbit`, amounts like `500GB`, times like `2h`, counts like `1 peer`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from p2p_diloco.errors import ConfigError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}
"""Bits per second; powers of ten, as usual for network rates."""
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
"""Bytes; powers of ten, as on disks and invoices."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DAYS = {"day": 1.0, "d": 1.0, "month": 30.0}
WIRE_SHARE = 1.045
"""Bytes on Ethernet per byte of a long stream: with headers of packets, encryption and multiplexing."""
_COUNTS = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def parse_rate(text: str, name: str) -> float:
    """Parse `2gbit`, `20mbit`, `500kbit`, optionally with `/s`; a number without a unit is refused.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: it is not a rate.
    """
    rate = _scaled_number(text.strip().lower().removesuffix("/s"), _BITS)
    if rate is None:
        raise ConfigError(
            f"{name} is {text!r}; expected a rate with its unit, kbit, mbit or gbit per second, such as 20mbit"
        )
    return rate


def parse_bytes(text: str, name: str) -> float:
    """Parse `500GB`, `1.5 TB`, `200MB`; a number without a unit is refused.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: it is not an amount.
    """
    amount = _scaled_number(text, _BYTES)
    if amount is None:
        raise ConfigError(f"{name} is {text!r}; expected an amount with its unit, MB, GB or TB, such as 500GB")
    return amount


def parse_traffic(text: str, name: str) -> float:
    """Parse `10GB/day` or `300GB/month` into bytes per day; a month has 30 days.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: it is not an amount per day or month.
    """
    amount, _, period = text.strip().lower().partition("/")
    num_bytes, days = _scaled_number(amount, _BYTES), _DAYS.get(period.strip())
    if num_bytes is None or days is None:
        raise ConfigError(f"{name} is {text!r}; expected an amount per day or month, such as 10GB/day or 300GB/month")
    return num_bytes / days


def parse_seconds(text: str, name: str) -> float:
    """Parse `90s`, `30m`, `2h`, `1d`; a number without a unit is refused.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: it is not a time span.
    """
    seconds = _scaled_number(text, _SECONDS)
    if seconds is None:
        raise ConfigError(f"{name} is {text!r}; expected a time with its unit, s, m, h or d, such as 2h")
    return seconds


def _scaled_number(text: str, units: Mapping[str, float]) -> float | None:
    """Return a positive number times its unit; None if `text` is not one."""
    word = text.strip().lower()
    unit = next((unit for unit in units if word.endswith(unit)), "")
    try:
        number = float(word.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        return None
    return number if unit and 0.0 < number < math.inf else None


def check_count(count: int, name: str) -> None:
    """Refuse a count below 1.

    Raises:
        ConfigError: it is below 1.
    """
    if count < 1:
        raise ConfigError(f"{name} is {count}; expected at least 1")


def check_positive(value: float, name: str, example: str) -> None:
    """Refuse a value that is not finite or not above 0.

    Args:
        name: name of the value, as the user writes it.
        example: an example of a valid value.
    Raises:
        ConfigError: the value is invalid.
    """
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"{name} is {value:g}; expected more than 0, such as {example}")


def counted(count: int, noun: str) -> str:
    """Return `1 peer`, `2 peers`, `no peers`."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def format_part(part: int, whole: int, noun: str = "") -> str:
    """Return `3 of 4 members`, `1 of 1 member`, or without a noun `3 of 4`; `part` is capped at `whole`."""
    return f"{min(part, whole)} of {counted(whole, noun) if noun else whole}"


def format_rate(bits_per_second: float) -> str:
    """Return `500 kbit/s`, `4.1 Mbit/s`, `2 Gbit/s`."""
    for name, unit in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= unit:
            return f"{bits_per_second / unit:.3g} {name}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def count_named(text: str, name: str = "--parameters") -> int:
    """Parse `100M` or `100000000`.

    Raises:
        ConfigError: it is not a count, or below 1M.
    """
    word = text.strip().lower()
    unit = _COUNTS.get(word[-1:], 1)
    number = word[:-1] if unit > 1 else word
    try:
        count = int(float(number) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1_000_000:
        raise ConfigError(f"{name} is {text!r}; expected at least 1M, like 100M or 12B")
    return count
