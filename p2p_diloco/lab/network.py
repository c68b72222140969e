"""Links between lab machines: two lanes each way, each in order; a link that breaks loses what was still under way.

Weather is what may happen to any message; walls are who cannot reach whom. Both belong to a scenario's faults.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p_diloco.lab.machine import Machine


@dataclass(slots=True)
class Weather:
    """What happens to messages now.

    Attributes:
        loss: share that never arrives, as when a deadline passes in the sender's queue.
        duplication: share that arrives twice.
        delay: the usual travelling time in seconds, from and to.
        delay_median, delay_sigma: when set, the travelling time is log-normal instead, as on the open internet.
        slow_share, slow_seconds: share of messages that hold up their lane, by at most so long.
        lane_seconds: how far lanes and links may run apart, so that what was sent first comes last.
    """

    loss: float = 0.0
    duplication: float = 0.0
    delay: tuple[float, float] = (0.01, 0.1)
    delay_median: float = 0.0
    delay_sigma: float = 0.0
    slow_share: float = 0.0
    slow_seconds: float = 0.0
    lane_seconds: float = 0.0


class Half:
    """One direction of a link, with the time up to which each lane is taken."""

    __slots__ = ("bulk_at", "control_at", "is_up", "lags", "sender", "target")

    def __init__(self, sender: Machine, target: Machine) -> None:
        self.sender = sender
        self.target = target
        self.is_up = True
        self.control_at = 0.0
        self.bulk_at = 0.0
        self.lags = (0.0, 0.0)


@dataclass(eq=False, slots=True)
class Link:
    """Two halves; after a break it stands until both ends have heard of it.

    Attributes:
        untold: ends that have not heard of the break.
    """

    halves: tuple[Half, Half]
    untold: set[str] = field(default_factory=set)

    @property
    def is_up(self) -> bool:
        """Tell whether messages still pass."""
        return self.halves[0].is_up

    def close(self) -> None:
        """Let nothing pass any more; what is under way is lost."""
        for half in self.halves:
            half.is_up = False
        self.untold = {half.sender.name for half in self.halves}


Pair = tuple[str, str]


def pair_of(a: Machine, b: Machine) -> Pair:
    """Return the name of the link between two machines."""
    return (a.name, b.name) if a.name < b.name else (b.name, a.name)


class Network:
    """All links and walls. Knows no time: the stage says when things happen."""

    def __init__(self, rng: random.Random) -> None:
        self.weather = Weather()
        self.links: dict[Pair, Link] = {}
        self._pairs: dict[str, dict[Pair, None]] = {}
        self.sides: dict[str, int] = {}
        """Which side of a partition a machine is on; those of no side are on all."""
        self.muted: frozenset[Pair] = frozenset()
        """(sender, target) pairs whose messages vanish, as behind a one-way failure."""
        self._rng = rng

    def can_meet(self, a: Machine, b: Machine) -> bool:
        """Tell whether one of two machines could dial the other now."""
        awake = a.runs and b.runs and not a.paused and not b.paused
        return awake and (a.dialable or b.dialable) and not self.is_walled(a, b)

    def is_walled(self, a: Machine, b: Machine) -> bool:
        """Tell whether a partition stands between two machines."""
        one, other = self.sides.get(a.name), self.sides.get(b.name)
        return one is not None and other is not None and one != other

    def connect(self, a: Machine, b: Machine) -> None:
        """Open a link between two machines that have none."""
        halves = (Half(a, b), Half(b, a))
        most = self.weather.lane_seconds
        for half in halves:
            half.lags = (self._rng.random() * most, self._rng.random() * most)
            half.sender.links[half.target.peer] = half
        pair = pair_of(a, b)
        self.links[pair] = Link(halves=halves)
        for name in pair:
            self._pairs.setdefault(name, {})[pair] = None

    def break_link(self, pair: Pair) -> Link | None:
        """Break a link; None when it is broken already or there is none."""
        link = self.links.get(pair)
        if link is None or not link.is_up:
            return None
        link.close()
        for half in link.halves:
            half.sender.links.pop(half.target.peer, None)
        return link

    def told(self, pair: Pair, name: str) -> bool:
        """Note that one end has heard of a break; True once both have and the link is forgotten."""
        link = self.links[pair]
        link.untold.discard(name)
        if link.untold:
            return False
        del self.links[pair]
        for end in pair:
            del self._pairs[end][pair]
        return True

    def links_of(self, machine: Machine) -> list[Pair]:
        """Return the links of a machine, broken ones that somebody has not heard of included."""
        return list(self._pairs.get(machine.name, {}))

    def separate(self, *sides: Iterable[str]) -> list[Pair]:
        """Put up a wall between sides; return the links that it cuts."""
        self.sides = {name: place for place, names in enumerate(sides) for name in names}
        return [
            pair for pair, link in self.links.items() if link.is_up and self.is_walled(*(h.sender for h in link.halves))
        ]

    def arrivals(self, half: Half, now: float, is_bulk: bool) -> list[float]:
        """Return when copies of a message sent now arrive: none when it is lost, two when it is doubled."""
        weather, rng = self.weather, self._rng
        if self.muted and (half.sender.name, half.target.name) in self.muted:
            return []
        if weather.loss and rng.random() < weather.loss:
            return []
        low, high = weather.delay
        if weather.delay_median:
            arrival = now + weather.delay_median * math.exp(weather.delay_sigma * rng.gauss(0.0, 1.0))
        else:
            arrival = now + low + (high - low) * rng.random() + half.lags[is_bulk]
        if weather.slow_share and rng.random() < weather.slow_share:
            arrival += weather.slow_seconds * rng.random()
        taken = half.bulk_at if is_bulk else half.control_at
        arrival = arrival if arrival > taken else taken
        if is_bulk:
            half.bulk_at = arrival
        else:
            half.control_at = arrival
        if weather.duplication and rng.random() < weather.duplication:
            return [arrival, arrival + high * rng.random()]
        return [arrival]
