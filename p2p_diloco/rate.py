"""Numbers with a unit, as people write them: rates of a line like `20mbit`, counts of parameters like `100M`."""

from __future__ import annotations

from p2p_diloco.errors import ConfigError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}
"""Bits per second; powers of ten, as lines are sold."""
_COUNTS = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def parse_rate(text: str, name: str) -> float:
    """Read `2gbit`, `20mbit`, `500kbit`, each also with `/s`, or a plain number of bits per second.

    Args:
        name: of what is read, for the error.
    Raises:
        ConfigError: it is none.
    """
    word = text.strip().lower().removesuffix("/s")
    unit = next((unit for unit in _BITS if word.endswith(unit)), "")
    try:
        rate = float(word.removesuffix(unit)) * _BITS.get(unit, 1.0)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise ConfigError(f"{name} is {text!r}; expected a rate like 20mbit or 2gbit")
    return rate


def format_rate(bits_per_second: float) -> str:
    """Return `500 kbit/s`, `4.1 Mbit/s`, `2 Gbit/s`."""
    for name, unit in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= unit:
            return f"{bits_per_second / unit:.3g} {name}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def count_named(text: str) -> int:
    """Read `100M` or `100000000`.

    Raises:
        ConfigError: it is neither.
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
