"""The demo's timeline, fixed before the first process starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError

BOOTSTRAP = "bootstrap"
LONE = "lone"
MIN_PEERS, MAX_PEERS = 3, 64
MIN_SECONDS = 40.0
FRAGMENTS = 2
GROUP_SIZE = 3
"""Members of a row: small enough that a handful of peers already form a grid."""

_ROUND_SECONDS = {"tiny": 2.0, "small": 10.0}
_PEERS_AT_THAT_PACE = 4
_LEAST_CYCLES = 10
_LATE_SHARE, _KILL_SHARE, _BOOTSTRAP_SHARE = 0.25, 0.45, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options as typed.

    Attributes:
        peers: number of volunteers, including the late one but not the bootstrap.
        seconds: duration of training, from the first round to the last.
        model: built-in size.
        data: text to train on; None for the standard library's source.
        json: file for the figures, "-" for standard output.
        report: folder for the report.
        with_lone: also train one island alone, for comparison.
    """

    peers: int = 6
    seconds: float = 150.0
    model: str = "tiny"
    data: str | None = None
    json: str | None = None
    report: Path = Path("demo-report")
    with_lone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The demo's timeline; times in seconds since round 0 begins.

    Attributes:
        options: the options it was made from.
        clock_start: start of round 0, Unix seconds.
        round_seconds: length of a round.
        num_rounds: rounds of the whole demo; a multiple of a cycle.
        early: names of the peers that start first.
        late: name of the peer that starts later.
        victim: name of the peer that is killed.
        late_at: when `late` starts.
        kill_at: when `victim` is killed.
        bootstrap_kill_at: when the bootstrap is killed.
    """

    options: DemoOptions
    clock_start: float
    round_seconds: float
    num_rounds: int
    early: tuple[str, ...]
    late: str
    victim: str
    late_at: float
    kill_at: float
    bootstrap_kill_at: float

    @property
    def last_round(self) -> int:
        """Round after which all peers stop."""
        return self.num_rounds - 1

    @property
    def end_at(self) -> float:
        """When the last round is over."""
        return self.num_rounds * self.round_seconds

    @property
    def evaluate_seconds(self) -> float:
        """Seconds between two measurements: enough for a curve without slowing the training much."""
        return min(max(self.end_at / 12, 4.0), 15.0)

    @property
    def peers(self) -> tuple[str, ...]:
        """All volunteers."""
        return (*self.early, self.late)

    def manifest_values(self) -> dict[str, Any]:
        """Return the manifest values that differ from the defaults, by dotted key."""
        values: dict[str, Any] = {
            "model.size": self.options.model,
            "rounds.clock_start": self.clock_start,
            "rounds.round_seconds": self.round_seconds,
            "rounds.fragments": FRAGMENTS,
            "rounds.planned_cycles": max(1, self.num_rounds // FRAGMENTS),
            "membership.group_size": GROUP_SIZE,
        }
        return values

    def lone_values(self) -> dict[str, Any]:
        """Return the same for the island that trains alone, where outer steps must not change its trajectory.

        An outer step of size 1 without momentum, over lossless vectors, moves the anchor exactly to the island.
        """
        whole = {"codec.contribution": "float32", "codec.entry": "float32"}
        alone = {"outer.learning_rate": 1.0, "outer.momentum": 0.0, **whole}
        return {**self.manifest_values(), **alone}


def plan_demo(options: DemoOptions, *, now_seconds: float) -> DemoPlan:
    """Plan a demo that begins now.

    Raises:
        ConfigError: too few or too many peers, too little time, or an unknown model.
    """
    if not MIN_PEERS <= options.peers <= MAX_PEERS:
        raise ConfigError(
            f"--peers is {options.peers}; expected {MIN_PEERS} to {MAX_PEERS}: one is killed and one comes late"
        )
    if not (math.isfinite(options.seconds) and options.seconds >= MIN_SECONDS):
        raise ConfigError(f"--seconds is {options.seconds:g}; expected at least {MIN_SECONDS:g}")
    if options.model not in _ROUND_SECONDS:
        raise ConfigError(f"--model is {options.model!r}; expected {' or '.join(_ROUND_SECONDS)}")
    round_seconds = _round_seconds(options)
    cycles = max(1, int(options.seconds / (round_seconds * FRAGMENTS)))
    names = tuple(f"peer-{number}" for number in range(1, options.peers + 1))
    return DemoPlan(
        options=options,
        # Time for the processes to import, find each other and found the run.
        clock_start=float(round(now_seconds + 10.0 + 2.5 * options.peers)),
        round_seconds=round_seconds,
        num_rounds=cycles * FRAGMENTS,
        early=names[:-1],
        late=names[-1],
        victim=names[1],
        late_at=_LATE_SHARE * options.seconds,
        kill_at=_KILL_SHARE * options.seconds,
        bootstrap_kill_at=_BOOTSTRAP_SHARE * options.seconds,
    )


def _round_seconds(options: DemoOptions) -> float:
    """Return the length of a round: longer for many peers, which share this machine, but the demo has ten cycles."""
    pace = _ROUND_SECONDS[options.model]
    shared = pace * options.peers / _PEERS_AT_THAT_PACE
    most = math.floor(1000.0 * options.seconds / (_LEAST_CYCLES * FRAGMENTS)) / 1000.0
    return max(pace, min(shared, most))
