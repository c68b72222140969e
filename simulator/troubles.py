"""The kinds of trouble: one small class for each, with a schedule drawn from the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from p2p_diloco.errors import ConfigError
from p2p_diloco.protocol.wire.member import FULL_SHARE
from simulator.hostility import MUTATORS, Stranger
from simulator.network import OUTBOUND_ONLY
from simulator.process import run_in
from simulator.run import ROUND_SECONDS, SPAN_ELEMENTS
from simulator.simulation import Simulation

SLOWED = 12.0
"""Factor by which a step takes longer on a machine that has slowed down."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The random source of a schedule.

    Attributes:
        names: all machines; the first one founds the run.
        begin, end: seconds between which there are troubles.
    """

    rng: random.Random
    names: tuple[str, ...]
    begin: float
    end: float

    def span(self) -> tuple[float, float]:
        """Return the start and the end of a trouble."""
        at = self.rng.uniform(self.begin, self.end)
        seconds = ROUND_SECONDS * self.rng.choice([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]) * self.rng.uniform(0.5, 1.5)
        return at, min(at + seconds, self.end)

    def some(self, most: int | None = None) -> tuple[str, ...]:
        """Return the name of one machine, or of several."""
        count = self.rng.randint(1, most or len(self.names)) if self.rng.random() < 0.4 else 1
        return tuple(self.rng.sample(self.names, count))

    def others(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return these machines without the founder, which must keep its disk and not die for good."""
        return tuple(name for name in names if name != self.names[0])


@dataclass(kw_only=True)
class Trouble:
    """One trouble with a start and an end; an infinite end: never.

    Attributes:
        at, until: start and end, in seconds since round 0 began.
        names: machines that it affects.
    """

    kind: ClassVar[str]
    kills: ClassVar[bool] = False
    """Whether its machines stay dead if it never ends."""
    most: ClassVar[int] = 6
    """Maximum number of this kind in one scenario."""
    at: float
    until: float
    names: tuple[str, ...] = ()

    @classmethod
    def draw(cls, draw: Draw) -> Trouble:
        """Draw a trouble of this kind."""
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.some())

    def begin(self, swarm: Simulation) -> None:
        """Begin the trouble."""
        for name in self.names:
            self.strike(swarm, name)

    def end(self, swarm: Simulation) -> None:
        """End the trouble; what it has already done stays done."""
        for name in self.names:
            self.mend(swarm, name)

    def strike(self, swarm: Simulation, name: str) -> None:
        """Begin the trouble on one machine."""

    def mend(self, swarm: Simulation, name: str) -> None:
        """End the trouble on one machine."""

    @property
    def is_for_good(self) -> bool:
        """Return whether it never ends."""
        return math.isinf(self.until)

    @property
    def leaves_dead(self) -> bool:
        """Return whether its machines stay dead."""
        return self.kills and self.is_for_good

    def describe(self) -> str:
        """Return a short description."""
        until = "for good" if self.is_for_good else f"until {self.until:.1f}"
        return f"{self.kind} {' '.join(self.names)} {until}"


# -- the network


@dataclass(kw_only=True)
class Loss(Trouble):
    """Frames are lost independently of each other, which is harsher than any stream."""

    kind = "loss"
    most = 1
    share: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> Loss:
        return cls(at=draw.begin, until=draw.end, share=draw.rng.choice([0.005, 0.02, 0.05, 0.15]))

    def begin(self, swarm: Simulation) -> None:
        swarm.network.trouble.loss = self.share

    def end(self, swarm: Simulation) -> None:
        swarm.network.trouble.loss = 0.0


@dataclass(kw_only=True)
class Delay(Trouble):
    """Some frames take long, and delay those after them."""

    kind = "delay"
    most = 1
    share: float = 0.0
    seconds: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> Delay:
        share, rounds = draw.rng.choice([0.01, 0.05]), draw.rng.choice([0.2, 0.6, 1.2])
        return cls(at=draw.begin, until=draw.end, share=share, seconds=ROUND_SECONDS * rounds)

    def begin(self, swarm: Simulation) -> None:
        swarm.network.trouble.slow_share, swarm.network.trouble.slow_seconds = self.share, self.seconds

    def end(self, swarm: Simulation) -> None:
        swarm.network.trouble.slow_share = 0.0


@dataclass(kw_only=True)
class Lag(Trouble):
    """Each lane of each link has its own latency, so a frame that was sent first can arrive last."""

    kind = "lag"
    most = 1
    seconds: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> Lag:
        return cls(at=draw.begin, until=draw.end, seconds=ROUND_SECONDS * draw.rng.choice([0.05, 0.2, 0.4]))

    def begin(self, swarm: Simulation) -> None:
        swarm.network.trouble.lag_seconds = self.seconds

    def end(self, swarm: Simulation) -> None:
        swarm.network.trouble.lag_seconds = 0.0


@dataclass(kw_only=True)
class Links(Trouble):
    """All links of some machines break at once."""

    kind = "links"

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.break_links(name)


@dataclass(kw_only=True)
class Partition(Trouble):
    """No traffic passes between two sides."""

    kind = "partition"

    @classmethod
    def draw(cls, draw: Draw) -> Partition:
        at, until = draw.span()
        count = draw.rng.randint(1, max(1, len(draw.names) - 1))
        return cls(at=at, until=until, names=tuple(draw.rng.sample(draw.names, count)))

    def begin(self, swarm: Simulation) -> None:
        swarm.partition(self.names, [name for name in swarm.machines if name not in self.names])

    def end(self, swarm: Simulation) -> None:
        swarm.heal()


@dataclass(kw_only=True)
class OneWay(Partition):
    """One side does not receive what the other sends."""

    kind = "one-way"

    def begin(self, swarm: Simulation) -> None:
        others = [machine.peer for name, machine in swarm.machines.items() if name not in self.names]
        swarm.network.mute([swarm.machines[name].peer for name in self.names], others)


@dataclass(kw_only=True)
class DirectoryDown(Trouble):
    """The directory does not answer."""

    kind = "directory"

    @classmethod
    def draw(cls, draw: Draw) -> DirectoryDown:
        at, until = draw.span()
        return cls(at=at, until=until)

    def begin(self, swarm: Simulation) -> None:
        swarm.directory.is_down = True

    def end(self, swarm: Simulation) -> None:
        swarm.directory.is_down = False


@dataclass(kw_only=True)
class Thin(Trouble):
    """Some lines are thin: their peers average less."""

    kind = "thin"
    share: int = 1

    @classmethod
    def draw(cls, draw: Draw) -> Thin:
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.some(), share=draw.rng.choice([1, 2, 4]))

    def strike(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        machine.share = self.share
        if machine.engine is not None:
            machine.engine.set_conditions(replace(machine.engine.conditions, share=self.share))

    def mend(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        machine.share = None
        if machine.engine is not None:
            machine.engine.set_conditions(replace(machine.engine.conditions, share=FULL_SHARE))


# -- processes and machines


@dataclass(kw_only=True)
class Stop(Trouble):
    """A process is stopped, as by SIGSTOP."""

    kind = "stall"

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.stop(name)

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.go_on(name)


@dataclass(kw_only=True)
class Sleep(Stop):
    """A machine sleeps: its monotonic clock stops, its wall clock does not."""

    kind = "sleep"

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.stop(name, sleeps=True)


@dataclass(kw_only=True)
class Kill(Trouble):
    """A process ends as by kill -9; some never come back."""

    kind = "kill"
    kills = True

    @classmethod
    def draw(cls, draw: Draw) -> Kill:
        at, until = draw.span()
        names = draw.some()
        if draw.rng.random() < 0.25:
            return cls(at=at, until=math.inf, names=draw.others(names))
        return cls(at=at, until=until, names=names)

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.kill(name)

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.start(name)


@dataclass(kw_only=True)
class Power(Trouble):
    """A machine loses power: unsynced data is lost, and its monotonic clock restarts."""

    kind = "power"

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.cut_power(name)

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.start(name)


@dataclass(kw_only=True)
class Wipe(Trouble):
    """A process ends and its state is lost, but not its identity."""

    kind = "wipe"

    @classmethod
    def draw(cls, draw: Draw) -> Wipe:
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.others(draw.some()))

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.wipe(name)

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.start(name)


@dataclass(kw_only=True)
class Leave(Trouble):
    """A peer declares that it leaves, goes, and comes back."""

    kind = "leave"
    linger: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> Leave:
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.some(), linger=draw.rng.uniform(0.0, ROUND_SECONDS))

    def strike(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        if machine.runs and not machine.is_stopped:
            swarm.leave(name)
            life = machine.lives
            swarm.at(swarm.now + self.linger, lambda: swarm.end(name, "goes") if machine.lives == life else None)

    def mend(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        if machine.engine is not None and machine.engine.membership.local.leaving:
            swarm.end(name, "goes")
        swarm.start(name)


@dataclass(kw_only=True)
class Speed(Trouble):
    """Training slows down suddenly, so contributions are late."""

    kind = "speed"

    def strike(self, swarm: Simulation, name: str) -> None:
        self._set(swarm, name, SLOWED)

    def mend(self, swarm: Simulation, name: str) -> None:
        self._set(swarm, name, 1.0 / SLOWED)

    def _set(self, swarm: Simulation, name: str, factor: float) -> None:
        machine = swarm.machines[name]
        machine.step_seconds *= factor
        if machine.island is not None and machine.process is not None:
            run_in(machine.process, machine.island.slow_down, factor)


@dataclass(kw_only=True)
class LateWork(Trouble):
    """The vector worker answers late."""

    kind = "late-work"
    seconds: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> LateWork:
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.some(), seconds=draw.rng.choice([0.4, 2.0, 6.0]))

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].reduce_seconds = self.seconds

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].reduce_seconds = 0.0


@dataclass(kw_only=True)
class Flip(Trouble):
    """A bit of a span in memory flips. It happens once per scenario: correcting it takes two witnesses."""

    kind = "flip"
    most = 1
    seed: int = 0

    @classmethod
    def draw(cls, draw: Draw) -> Flip:
        at, until = draw.span()
        return cls(at=at, until=until, names=(draw.rng.choice(draw.names),), seed=draw.rng.randrange(1 << 30))

    def strike(self, swarm: Simulation, name: str) -> None:
        rng = random.Random(self.seed)
        for _ in range(16):
            if swarm.flip_bit(name, rng.choice(swarm.spans), rng.randrange(SPAN_ELEMENTS), rng.randrange(32)):
                return


# -- clocks


@dataclass(kw_only=True)
class Clock(Trouble):
    """A wall clock is set wrong by a fraction of a round, and later set right."""

    kind = "clock"
    seconds: float = 0.0
    rounds: ClassVar[float] = 0.6

    @classmethod
    def draw(cls, draw: Draw) -> Clock:
        at, until = draw.span()
        seconds = ROUND_SECONDS * draw.rng.uniform(-cls.rounds, cls.rounds)
        return cls(at=at, until=until, names=draw.some(), seconds=seconds)

    def strike(self, swarm: Simulation, name: str) -> None:
        self._set(swarm, name, self.seconds)

    def mend(self, swarm: Simulation, name: str) -> None:
        self._set(swarm, name, -self.seconds)

    def _set(self, swarm: Simulation, name: str, seconds: float) -> None:
        clock, true = swarm.machines[name].clock, swarm.loop.true_seconds()
        clock.set_wall(true, clock.wall(true) - true + seconds)
        swarm.note(swarm.machines[name], "clock", f"set by {seconds:.1f} s")


@dataclass(kw_only=True)
class FarClock(Clock):
    """Wall clocks are set wrong by minutes, and later set right."""

    kind = "far-clock"
    rounds = 80.0


@dataclass(kw_only=True)
class FirstClock(Clock):
    """The founder's clock is ahead from the start, and set right halfway through the troubles."""

    kind = "first-clock"
    most = 1

    @classmethod
    def draw(cls, draw: Draw) -> FirstClock:
        until = (draw.begin + draw.end) / 2
        return cls(at=-9.9, until=until, names=draw.names[:1], seconds=draw.rng.choice([60.0, 600.0]))


# -- disks


@dataclass(kw_only=True)
class FullDisk(Trouble):
    """A disk is full. A peer that must keep something ends, and comes back later."""

    kind = "disk"

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].disk.is_full = True

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].disk.is_full = False
        swarm.start(name)


@dataclass(kw_only=True)
class SlowDisk(Trouble):
    """Writing to a disk takes seconds."""

    kind = "slow-disk"
    seconds: float = 0.0

    @classmethod
    def draw(cls, draw: Draw) -> SlowDisk:
        at, until = draw.span()
        return cls(at=at, until=until, names=draw.some(), seconds=draw.rng.choice([0.5, 3.0, 12.0]))

    def strike(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].disk.write_seconds = self.seconds

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].disk.write_seconds = 0.0


@dataclass(kw_only=True)
class Snapshot(Trouble):
    """A machine comes back with an earlier state, as from a backup."""

    kind = "snapshot"
    most = 2
    files: dict[str, dict[Path, bytes]] = field(default_factory=dict)

    def strike(self, swarm: Simulation, name: str) -> None:
        self.files[name] = swarm.snapshot(name)

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.end(name, "is restored from a backup")
        swarm.inspector.restored.add(swarm.machines[name].peer)
        swarm.restore(name, self.files[name])
        swarm.start(name)


# -- reach


@dataclass(kw_only=True)
class Router(Trouble):
    """Machines listen but cannot be reached: their routers accept no inbound connections, and they do not know it."""

    kind = "router"
    most = 1
    place: ClassVar[str] = OUTBOUND_ONLY

    @classmethod
    def draw(cls, draw: Draw) -> Router:
        names = draw.others(draw.names)
        count = draw.rng.randint(min(1, len(names)), len(names))
        return cls(at=-9.9, until=math.inf, names=tuple(draw.rng.sample(names, count)))

    def strike(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        machine.place = self.place
        machine.believes_open = True
        swarm.network.places[machine.peer] = machine.place


@dataclass(kw_only=True)
class Home(Router):
    """Machines of one home network can be reached only by each other, and do not know it.

    The founder may be among them, with a forwarded port, if all members are in one row: in a grid, a row of members
    from elsewhere may have only reducers that it cannot reach, until rosters deal them anew.
    """

    kind = "home"
    place = "home"
    has_founder: bool = False

    @classmethod
    def draw(cls, draw: Draw) -> Home:
        drawn = super().draw(draw)
        has_founder = draw.rng.random() < 0.5
        names = (draw.names[0], *drawn.names) if has_founder else drawn.names
        return cls(at=drawn.at, until=drawn.until, names=names, has_founder=has_founder)

    def strike(self, swarm: Simulation, name: str) -> None:
        is_founder = self.has_founder and name == self.names[0]
        if not is_founder:
            super().strike(swarm, name)
        if not is_founder or swarm.rules.group_size > len(swarm.machines):
            swarm.network.lans[swarm.machines[name].peer] = self.place


# -- hostility


@dataclass(kw_only=True)
class Liar(Trouble):
    """A member whose node is sound, but whose messages are altered."""

    kind = "liar"
    most = 1
    lie: str = ""
    seed: int = 0

    @classmethod
    def draw(cls, draw: Draw) -> Liar:
        names = draw.others(draw.names) or draw.names
        lie = draw.rng.choice(sorted(MUTATORS))
        return cls(
            at=draw.begin, until=draw.end, names=(draw.rng.choice(names),), lie=lie, seed=draw.rng.randrange(1 << 30)
        )

    def strike(self, swarm: Simulation, name: str) -> None:
        machine = swarm.machines[name]
        swarm.note(machine, "lies", self.lie)
        machine.lie(MUTATORS[self.lie](machine, random.Random(self.seed)))

    def mend(self, swarm: Simulation, name: str) -> None:
        swarm.machines[name].lie(None)


@dataclass(kw_only=True)
class Strangers(Trouble):
    """A non-member with a key sends frames to all peers that can be dialled."""

    kind = "stranger"
    most = 3
    seed: int = 0
    stranger: Stranger | None = None

    @classmethod
    def draw(cls, draw: Draw) -> Strangers:
        at, until = draw.span()
        return cls(at=at, until=until, seed=draw.rng.randrange(1 << 30))

    def begin(self, swarm: Simulation) -> None:
        self.stranger = Stranger(swarm, self.seed)
        self.stranger.begin()

    def end(self, swarm: Simulation) -> None:
        if self.stranger is not None:
            self.stranger.end()


KINDS: dict[str, type[Trouble]] = {
    cls.kind: cls
    for cls in (
        Loss, Delay, Lag, Links, Partition, OneWay, DirectoryDown, Thin, Stop, Sleep, Kill, Power, Wipe, Leave, Speed,
        LateWork, Flip, Clock, FarClock, FirstClock, FullDisk, SlowDisk, Snapshot, Router, Home, Liar, Strangers,
    )
}  # fmt: skip


def kinds_named(text: str) -> frozenset[str]:
    """Parse `all`, `none`, or comma-separated kinds.

    Raises:
        ConfigError: a word is not a kind.
    """
    groups = {"all": frozenset(KINDS), "none": frozenset()}
    named: frozenset[str] = frozenset()
    for word in (word.strip() for word in text.split(",")):
        if word in groups:
            named |= groups[word]
        elif word in KINDS:
            named |= {word}
        elif word:
            known = ", ".join([*groups, *KINDS])
            raise ConfigError(f"--kinds names {word!r}; expected some of {known}")
    return named
