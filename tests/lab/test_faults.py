"""Faults by name, and what they do to a swarm."""

from __future__ import annotations

import math
import random

import pytest
from lab_swarms import founded

from p2p_diloco.errors import ConfigError
from p2p_diloco.lab.faults import FaultKind, Strike, draw_weather, faults_named, is_for_good, mend, strike


def fault(kind: FaultKind, *names: str, amount: float = 0.0) -> Strike:
    return Strike(kind=kind, at=0.0, until=1.0, names=names, amount=amount)


def test_faults_are_named_one_by_one_or_all() -> None:
    assert faults_named("all") == frozenset(FaultKind)
    assert faults_named("none") == frozenset()
    assert faults_named("loss, kill") == {FaultKind.LOSS, FaultKind.KILL}
    with pytest.raises(ConfigError, match="--faults names 'rain'; expected all, none, or some of loss"):
        faults_named("rain")


def test_weather_follows_from_what_is_chosen() -> None:
    rng = random.Random(1)
    fair = draw_weather([], rng, 8.0)
    assert (fair.loss, fair.duplication, fair.slow_share, fair.lane_seconds) == (0.0, 0.0, 0.0, 0.0)
    foul = draw_weather(FaultKind, rng, 8.0)
    assert min(foul.loss, foul.duplication, foul.slow_share, foul.slow_seconds, foul.lane_seconds) > 0.0


def test_who_is_struck_is_mended() -> None:
    swarm = founded(3)
    machine = swarm.machines["p0"]
    for kind, is_struck in (
        (FaultKind.KILL, lambda: not machine.runs),
        (FaultKind.WIPE, lambda: not machine.runs),
        (FaultKind.STALL, lambda: machine.paused),
        (FaultKind.DISK, lambda: machine.disk.is_full),
        (FaultKind.SPEED, lambda: machine.step_seconds > 1.0),
        (FaultKind.CLOCK, lambda: machine.offset_seconds != 0.0),
        (FaultKind.THIN, lambda: machine.running.membership.share == 3),
    ):
        struck = fault(kind, "p0", amount=3.0)
        strike(swarm, struck)
        assert is_struck(), kind
        mend(swarm, struck)
        assert not is_struck(), kind
        assert machine.runs
    assert machine.running.me.incarnation == 3


def test_who_leaves_says_so_dies_and_comes_back() -> None:
    swarm = founded(3)
    struck = fault(FaultKind.LEAVE, "p0", amount=2.0)
    strike(swarm, struck)
    assert swarm.machines["p0"].running.membership.leaving
    swarm.run(3.0)
    assert not swarm.machines["p0"].runs
    mend(swarm, struck)
    assert swarm.machines["p0"].running.me.incarnation == 2
    strike(swarm, struck)
    mend(swarm, struck)
    assert swarm.machines["p0"].running.me.incarnation == 3


def test_walls_links_and_bits() -> None:
    swarm = founded(3)
    p0, p1 = swarm.machines["p0"], swarm.machines["p1"]
    strike(swarm, fault(FaultKind.PARTITION, "p0"))
    assert not swarm.network.can_meet(p0, p1)
    strike(swarm, fault(FaultKind.ONE_WAY, "p0"))
    assert ("p0", "p1") in swarm.network.muted
    mend(swarm, fault(FaultKind.PARTITION, "p0"))
    assert swarm.network.can_meet(p0, p1)
    assert swarm.network.muted == frozenset()
    swarm.run(10.0)
    strike(swarm, fault(FaultKind.LINKS, "p0"))
    mend(swarm, fault(FaultKind.LINKS, "p0"))
    assert p0.links == {}
    strike(swarm, fault(FaultKind.FLIP, "p1", amount=0.5))
    assert {name for name, _ in swarm.inspector.differing} == {"p1"}


def test_some_are_never_mended() -> None:
    assert not is_for_good(fault(FaultKind.KILL, "p0"))
    assert is_for_good(Strike(kind=FaultKind.KILL, at=0.0, until=math.inf, names=("p0",)))
