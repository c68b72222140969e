"""Upload rates of islands: `5mbit`, `20mbit`, `1.5mbit`, or unlimited."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError

UNLIMITED = "unlimited"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST_BITS, MOST_BITS = 1e5, 1e11


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """Upload rate of each island.

    Attributes:
        name: as typed.
        bits_per_second: maximum rate; None: no limit.
    """

    name: str
    bits_per_second: float | None = None


def parse_uplinks(words: str) -> tuple[Uplink, ...]:
    """Return the rates in `--uplink`, which are separated by commas, without duplicates.

    Raises:
        ConfigError: there is none, or one is not a rate.
    """
    names = [name.strip().lower() for name in words.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--uplink is empty; expected rates like 20mbit, or {UNLIMITED}")
    return tuple(_uplink(name) for name in dict.fromkeys(names))


def _uplink(name: str) -> Uplink:
    if name == UNLIMITED:
        return Uplink(name=name)
    unit = next((unit for unit in _UNITS if name.endswith(unit)), None)
    try:
        bits = float(name.removesuffix(unit)) * _UNITS[unit] if unit else math.nan
    except ValueError:
        bits = math.nan
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ConfigError(f"--uplink is {name!r}; expected a rate from 100kbit to 100gbit, like 20mbit, or {UNLIMITED}")
    return Uplink(name=name, bits_per_second=bits)
