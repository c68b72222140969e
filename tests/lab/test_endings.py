"""What must have come true once faults have stopped: the checks pass for a sound swarm and bite."""

from __future__ import annotations

import pytest
from lab_swarms import founded

from p2p_diloco.lab.endings import (
    check_agreement,
    check_memory,
    check_ready,
    check_tables,
    cycles_until_it_goes_on,
    fragment_heights,
    ready_peers,
)
from p2p_diloco.lab.stage import Violated


def test_a_sound_swarm_passes() -> None:
    swarm = founded(3)
    before = fragment_heights(swarm)
    swarm.run_to(swarm.rules.clock.begin(12) - 0.5)
    check_agreement(swarm)
    check_memory(swarm)
    check_ready(swarm)
    check_tables(swarm)
    assert all(now > then for now, then in zip(fragment_heights(swarm), before, strict=True))
    assert {machine.name for machine in ready_peers(swarm)} == {"p0", "p1", "p2"}


def test_a_peer_behind_differs_and_a_fork_does() -> None:
    swarm = founded(4)
    swarm.run(60.0)
    swarm.partition(["p0", "p1"], ["p2", "p3", "boot"])
    swarm.run_until(lambda: swarm.members("p0") == {"p0", "p1"}, 600.0)
    swarm.run(60.0)
    with pytest.raises(Violated, match=r"I6: p2 and p0 are ready and differ at fragment 0 span 0"):
        check_agreement(swarm)


def test_memory_that_stays_wrong_and_peers_that_are_not_ready_are_told() -> None:
    swarm = founded(4)
    swarm.run(20.0)
    assert swarm.flip_bit("p1", swarm.spans[0], 0, 20)
    with pytest.raises(Violated, match="I1: p1 holds wrong bytes of fragment 0 span 0"):
        check_memory(swarm)
    swarm.machines["p1"].running.membership.ready = False
    with pytest.raises(Violated, match="I7: p1 is not ready"):
        check_ready(swarm)
    swarm.machines["p1"].running.linked.update(bytes([n]) for n in range(9))  # type: ignore[arg-type]
    with pytest.raises(Violated, match="I9: p1 keeps"):
        check_tables(swarm)


def test_how_long_it_may_take_depends_on_who_can_vote() -> None:
    swarm = founded(4)
    usual = cycles_until_it_goes_on(swarm)
    assert usual is not None
    swarm.kill("p1")
    assert cycles_until_it_goes_on(swarm) == usual
    swarm.kill("p2")
    halved = cycles_until_it_goes_on(swarm)
    assert halved is not None
    assert halved > usual + swarm.rules.void_cycles
    for name in ("p0", "p3"):
        swarm.kill(name)
    assert cycles_until_it_goes_on(swarm) is None
