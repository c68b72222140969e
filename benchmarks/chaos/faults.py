"""The faults of a play, drawn by its seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError

BOOTSTRAP = 0
"""Number of the bootstrap peer; islands count from 1."""
SPARED = 1
"""The island that is never killed and never leaves, if there are at least three: its memory is watched."""
RESTART_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        text: what happens, for people; {seconds} is how long.
        seconds: shortest and longest duration; (0, 0) for a process that ends and is started again.
        ends_process: whether the process of the victim ends.
        needs: what the machine must allow: "", "networks" or "disks".
    """

    text: str
    seconds: tuple[float, float] = (0.0, 0.0)
    ends_process: bool = False
    needs: str = ""


KINDS = {
    "kill": Kind(text="is killed (kill -9)", ends_process=True),
    "daemon": Kind(text="loses its libp2p daemon (kill -9)", ends_process=True),
    "leave": Kind(text="leaves, and another island comes in its place", ends_process=True),
    "bootstrap": Kind(text="is killed (kill -9)", ends_process=True),
    "stop": Kind(text="is stopped for {seconds} s", seconds=(3.0, 20.0)),
    "cut": Kind(text="is cut off from {other} for {seconds} s", seconds=(5.0, 20.0), needs="networks"),
    "cut-in": Kind(text="receives nothing from {other} for {seconds} s", seconds=(5.0, 20.0), needs="networks"),
    "cut-out": Kind(text="can send nothing to {other} for {seconds} s", seconds=(5.0, 20.0), needs="networks"),
    "router": Kind(text="accepts no connections for {seconds} s", seconds=(60.0, 60.0), needs="networks"),
    "clock": Kind(text="has a wall clock that is {ahead} s ahead for {seconds} s", seconds=(60.0, 60.0)),
    "disk": Kind(text="has a full disk for {seconds} s", seconds=(10.0, 25.0), needs="disks"),
}
"""All kinds. Only `bootstrap` has the bootstrap peer as its victim."""
_CLOCK_STEPS = (-600.0, -30.0, -2.0, 2.0, 30.0, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        at: when it begins, in seconds since the beginning of the measured time.
        kind: a key of `KINDS`.
        victim: number of the island, or `BOOTSTRAP`.
        seconds: how long it lasts.
        other: number of the one peer that a cut concerns; None: all.
        ahead: seconds that a wall clock is ahead.
    """

    at: float
    kind: str
    victim: int
    seconds: float = 0.0
    other: int | None = None
    ahead: float = 0.0

    @property
    def text(self) -> str:
        """Words for what happens to the victim, without its name."""
        other = "all others" if self.other is None else name_of(self.other)
        return KINDS[self.kind].text.format(seconds=f"{self.seconds:.0f}", other=other, ahead=f"{self.ahead:+.0f}")


def name_of(number: int) -> str:
    """Return the name of a peer."""
    return "bootstrap" if number == BOOTSTRAP else f"island-{number}"


def kinds_named(text: str) -> tuple[str, ...]:
    """Return kinds from a list with commas; "all": all of them.

    Raises:
        ConfigError: a kind is unknown, or none is named.
    """
    if text == "all":
        return tuple(KINDS)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"--faults names {name!r}; expected all, or some of {', '.join(KINDS)}")
    if not names:
        raise ConfigError(f"--faults is empty; expected all, or some of {', '.join(KINDS)}")
    return names


def draw_faults(
    *, seed: int, islands: int, seconds: float, every: float, kinds: Sequence[str], has_bootstrap: bool = True
) -> tuple[Fault, ...]:
    """Return one fault every `every` seconds, none at the beginning and at the end; kinds are equally frequent.

    Args:
        has_bootstrap: whether there is a bootstrap peer that can be killed.
    """
    lot = random.Random(seed)
    kinds = [kind for kind in kinds if has_bootstrap or kind != "bootstrap"]
    faults: list[Fault] = []
    bag: list[str] = []
    while kinds and (at := (len(faults) + 1) * every) < seconds:
        if not bag:
            bag = lot.sample(kinds, len(kinds))  # each kind once, then each again
        faults.append(_draw(lot, bag.pop(), at, islands))
    return tuple(faults)


def _draw(lot: random.Random, kind: str, at: float, islands: int) -> Fault:
    shortest, longest = KINDS[kind].seconds
    numbers = range(1, islands + 1)
    victims = [number for number in numbers if number != SPARED or islands < 3 or not KINDS[kind].ends_process]
    victim = BOOTSTRAP if kind == "bootstrap" else lot.choice(victims)
    other = lot.choice([BOOTSTRAP, *(number for number in numbers if number != victim)])
    return Fault(
        at=at,
        kind=kind,
        victim=victim,
        seconds=lot.uniform(shortest, longest),
        other=other if kind.startswith("cut") and lot.random() < 0.5 else None,
        ahead=lot.choice(_CLOCK_STEPS) if kind == "clock" else 0.0,
    )
