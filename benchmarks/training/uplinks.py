"""How thin the line is on which each island sends: `5mbit`, `20mbit`, `1.5mbit`, or unlimited."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError

UNLIMITED = "unlimited"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST_BITS, MOST_BITS = 1e5, 1e11


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """One line.

    Attributes:
        name: as typed.
        bits_per_second: what an island may send; None: as much as the machine lets it.
    """

    name: str
    bits_per_second: float | None = None


def parse_uplinks(words: str) -> tuple[Uplink, ...]:
    """Return what the words of `--uplink` mean, with commas between them; each once.

    Raises:
        ConfigError: none, or one that is no rate.
    """
    names = [name.strip().lower() for name in words.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--uplink names no line; expected rates like 20mbit, or {UNLIMITED}")
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
