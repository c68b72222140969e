"""What can go wrong in the lab: the words of `--faults`, and what each does to a swarm when it begins and ends.

Weather (loss, delay, reorder, duplicate) lasts for all of a run's bad times; the others strike at moments.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError
from p2p_diloco.lab.network import Weather
from p2p_diloco.lab.swarm import Swarm
from p2p_diloco.protocol.member import FULL_SHARE

SLOWED = 12.0
"""A machine that is slow all of a sudden takes so many times longer for a step."""


class FaultKind(enum.Enum):
    """The value is the word on the command line."""

    LOSS = "loss"
    DELAY = "delay"
    REORDER = "reorder"
    DUPLICATE = "duplicate"
    LINKS = "links"
    PARTITION = "partition"
    ONE_WAY = "one-way"
    STALL = "stall"
    KILL = "kill"
    WIPE = "wipe"
    LEAVE = "leave"
    FLIP = "flip"
    CLOCK = "clock"
    SPEED = "speed"
    DISK = "disk"
    THIN = "thin"


WEATHER = frozenset({FaultKind.LOSS, FaultKind.DELAY, FaultKind.REORDER, FaultKind.DUPLICATE})
STRIKES = frozenset(FaultKind) - WEATHER


def faults_named(text: str) -> frozenset[FaultKind]:
    """Read `all`, `none` or words with commas between them.

    Raises:
        ConfigError: a word names no fault.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return frozenset(FaultKind)
    if words == ["none"]:
        return frozenset()
    known = {kind.value: kind for kind in FaultKind}
    for word in words:
        if word not in known:
            raise ConfigError(f"--faults names {word!r}; expected all, none, or some of {', '.join(known)}")
    return frozenset(known[word] for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault that begins at a moment.

    Attributes:
        at, until: seconds; `until` infinite: never mended (a peer that stays dead).
        names: machines that it concerns; for a partition and a one-way failure those of one side.
        amount: of what, in the fault's own unit: seconds for a clock, a drawn number for a flipped bit, the share of
            averaging for a thin line.
    """

    kind: FaultKind
    at: float
    until: float
    names: tuple[str, ...]
    amount: float = 0.0


def draw_weather(kinds: Iterable[FaultKind], rng: random.Random, round_seconds: float) -> Weather:
    """Return the weather of the bad times."""
    weather, chosen = Weather(), set(kinds)
    if FaultKind.LOSS in chosen:
        weather.loss = rng.choice([0.005, 0.02, 0.05, 0.15])
    if FaultKind.DUPLICATE in chosen:
        weather.duplication = rng.choice([0.01, 0.1])
    if FaultKind.DELAY in chosen:
        weather.slow_share = rng.choice([0.01, 0.05])
        weather.slow_seconds = round_seconds * rng.choice([0.2, 0.6, 1.2])
    if FaultKind.REORDER in chosen:
        weather.lane_seconds = round_seconds * rng.choice([0.05, 0.2, 0.4])
    return weather


def strike(swarm: Swarm, fault: Strike) -> None:
    """Let a fault begin."""
    swarm.note(None, "fault", f"{fault.kind.value} {' '.join(fault.names)} until {fault.until:.1f}")
    match fault.kind:
        case FaultKind.PARTITION:
            swarm.partition(fault.names, [name for name in swarm.machines if name not in fault.names])
        case FaultKind.ONE_WAY:
            others = [name for name in swarm.machines if name not in fault.names]
            swarm.network.muted = frozenset((a, b) for a in fault.names for b in others)
        case FaultKind.LINKS:
            for pair in [pair for pair in swarm.network.links if pair[0] in fault.names or pair[1] in fault.names]:
                swarm.cut(pair)
        case FaultKind.FLIP:
            _flip(swarm, fault)
        case _:
            for name in fault.names:
                _strike_one(swarm, fault, name)


def _strike_one(swarm: Swarm, fault: Strike, name: str) -> None:
    machine = swarm.machines[name]
    match fault.kind:
        case FaultKind.KILL | FaultKind.WIPE:
            swarm.kill(name)
        case FaultKind.LEAVE if machine.runs and not machine.paused:
            swarm.leave(name)
            swarm.later(machine, fault.amount, swarm.kill, name)
        case FaultKind.STALL:
            swarm.pause(name)
        case FaultKind.CLOCK:
            machine.offset_seconds += fault.amount
        case FaultKind.SPEED:
            machine.step_seconds *= SLOWED
        case FaultKind.DISK:
            machine.disk.is_full = True
        case FaultKind.THIN if machine.runs:
            machine.running.membership.share = int(fault.amount)
        case _:
            pass


def _flip(swarm: Swarm, fault: Strike) -> None:
    """Flip one bit, drawn from `amount`; another one where that would leave all measure."""
    draw = random.Random(fault.amount)
    elements = swarm.maths.span_elements
    for _ in range(16):
        if swarm.flip_bit(fault.names[0], draw.choice(swarm.spans), draw.randrange(elements), draw.randrange(32)):
            return


def mend(swarm: Swarm, fault: Strike) -> None:
    """Let a fault end; what it has done already stays done."""
    match fault.kind:
        case FaultKind.PARTITION | FaultKind.ONE_WAY:
            swarm.heal()
        case FaultKind.LINKS | FaultKind.FLIP:
            return
        case _:
            for name in fault.names:
                _mend_one(swarm, fault, name)


def _mend_one(swarm: Swarm, fault: Strike, name: str) -> None:
    machine = swarm.machines[name]
    match fault.kind:
        case FaultKind.STALL:
            swarm.resume(name)
        case FaultKind.CLOCK:
            machine.offset_seconds -= fault.amount
        case FaultKind.SPEED:
            machine.step_seconds /= SLOWED
            swarm.quicken(machine)
        case FaultKind.DISK:
            machine.disk.is_full = False
        case FaultKind.THIN if machine.runs:
            machine.running.membership.share = FULL_SHARE
        case FaultKind.LEAVE if machine.runs and machine.running.membership.leaving:
            swarm.kill(name)
        case _:
            pass
    if fault.kind in (FaultKind.KILL, FaultKind.WIPE, FaultKind.LEAVE, FaultKind.DISK) and not machine.runs:
        swarm.start(name, keep_disk=fault.kind is not FaultKind.WIPE)


def is_for_good(fault: Strike) -> bool:
    """Tell whether a fault is never mended."""
    return math.isinf(fault.until)
