"""The options of the benchmarks, each declared once: name, type, default and meaning."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from p2p_diloco.app.cli.options import FiguresFlag
from p2p_diloco.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsOptions:
    """The options of `vectors`.

    Attributes:
        codec: int4, int8, bfloat16 or float32
        parameters: length of the vectors, like 1M
        repeat: measurements of each step
    """

    codec: str = "int4"
    parameters: str = "1M"
    repeat: int = 9
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """The options of `averaging`.

    Attributes:
        peers: 2 to 16, each a process with a libp2p daemon
        parameters: length of the vector, like 10M
        codec: codec of p2p_diloco's contributions and entries: int4, int8, bfloat16, float32
        against: hivemind (its averager, float32 and float16), gloo (torch.distributed, float32), both, or none
        spans: pieces in which p2p_diloco exchanges the vector; by default as many as `plan` recommends
        repeat: measured turns of each system
    """

    peers: int = 4
    parameters: str = "10M"
    codec: str = "int4"
    against: str = "hivemind,gloo"
    spans: int | None = None
    repeat: int = 5
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options of `chaos`.

    Attributes:
        islands: 2 to 16, each a process with a libp2p daemon, beside a bootstrap peer
        minutes: measured time of the play with faults
        quiet_minutes: measured time of the play without faults; by default the same
        every: time between two faults, like 30s; a process that ended is started again 5 s later
        seed: seed of the faults
        faults: all, or some of kill, daemon, leave, bootstrap, stop, cut, cut-in, cut-out, router, clock, disk
        bootstrap_dies: kill the bootstrap peer when the measured time begins, and leave it dead
        round_seconds: length of a round; a cycle has two
    """

    islands: int = 8
    minutes: float = 30.0
    quiet_minutes: float | None = None
    every: str = "30s"
    seed: int = 1
    faults: str = "all"
    bootstrap_dies: bool = False
    round_seconds: float = 2.0
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The options of `memory`.

    Attributes:
        peers: 2 to 16, each a process with a libp2p daemon
        parameters: sizes of the models, measured one after the other, like 10M,50M
    """

    peers: int = 4
    parameters: str = "10M,50M,125M"
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """The options of `state`.

    Attributes:
        megabytes: size of the state (anchor and momentum) in millions of bytes
        donors: 1 to 16, each a process with a libp2p daemon
        killed: donors to kill when half of the bytes have arrived
        repeat: transfers, each with new processes
    """

    megabytes: int = 800
    donors: int = 3
    killed: int = 1
    repeat: int = 3
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of `training`.

    Attributes:
        islands: 2 to 16, each a process of one thread with a libp2p daemon
        uplink: upload rate of each island: 5mbit, 20mbit, 100mbit, unlimited; separate several with commas
        against: own-loop (steps as Swarm.step makes them), blocking (waits for each exchange), torchft (its DiLoCo over
            gloo), or none; separate several with commas
        codec: codec of contributions and entries: int4, int8, bfloat16, float32
        fragments: parts of the model, exchanged in turn; more parts mean shorter rounds, and a step must fit into a
            round
        spans: pieces of each part; by default as many as `plan` recommends
        cycle_seconds: length of a cycle; 0: four times its transmission
        repeat: windows with the exchange, for each system and uplink
    """

    islands: int = 4
    uplink: str = "20mbit,unlimited"
    against: str = "blocking,torchft"
    codec: str = "int4"
    fragments: int = 1
    spans: int | None = None
    cycle_seconds: float = 0.0
    repeat: int = 3
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresOptions:
    """The options of `failures`.

    Attributes:
        islands: sizes of the swarms, from 1 to 256, separated by commas; a bootstrap peer is beside them
        repeat: single failures in each swarm
        cycle_seconds: length of a cycle of four rounds
        pause_seconds: time from a failure until the island starts again
        every_seconds: mean time between two failures in the swarm while they keep coming; 26.28 s for 1.2 million chips
            that fail once a year
        sustained_cycles: cycles measured while failures keep coming
    """

    islands: str = "1,2,4,8,16"
    repeat: int = 8
    cycle_seconds: float = 24.0
    pause_seconds: float = 18.0
    every_seconds: float = 26.28
    sustained_cycles: int = 24
    json: FiguresFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    """The options of `goodput`.

    Attributes:
        costs: figures of `failures`; by default those kept in benchmarks/figures
    """

    costs: str | None = None
    json: FiguresFlag = None


BenchOptions = (
    VectorsOptions
    | AveragingOptions
    | ChaosOptions
    | MemoryOptions
    | StateOptions
    | TrainingOptions
    | FailuresOptions
    | GoodputOptions
)


def check_within(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse the value of an option outside a range; None: there is no upper end.

    Raises:
        ConfigError: it is outside.
    """
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ConfigError(f"{name} is {value}; expected {expected}")
