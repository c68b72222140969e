"""Parse and format numbers: bit rates like `20mbit`, parameters like `100M`, counts like `1 peer`."""

from __future__ import annotations

import math

from p2p_diloco.errors import ConfigError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}
"""Bits per second; powers of ten, as usual for network rates."""
_COUNTS = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def parse_rate(text: str, name: str) -> float:
    """Parse `2gbit`, `20mbit`, `500kbit`, optionally with `/s`; a number without a unit is refused.

    Args:
        name: name of the value, for the error.
    Raises:
        ConfigError: it is not a rate.
    """
    word = text.strip().lower().removesuffix("/s")
    unit = next((unit for unit in _BITS if word.endswith(unit)), "")
    try:
        rate = float(word.removesuffix(unit)) * _BITS.get(unit, 1.0)
    except ValueError:
        rate = 0.0
    if not unit or not 0.0 < rate < float("inf"):
        raise ConfigError(
            f"{name} is {text!r}; expected a rate with its unit, kbit, mbit or gbit per second, such as 20mbit"
        )
    return rate


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


def count_named(text: str) -> int:
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
        raise ConfigError(f"--parameters is {text!r}; expected at least 1M, like 100M or 12B")
    return count
