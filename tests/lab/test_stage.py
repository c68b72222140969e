"""The heap of virtual time: lives, pauses, links and failures."""

from __future__ import annotations

import pytest
from lab_swarms import founded

from p2p_diloco.errors import StateError
from p2p_diloco.lab.stage import Violated


def test_what_was_meant_for_an_earlier_life_is_dropped_and_a_pause_delays_it() -> None:
    swarm = founded(2)
    machine = swarm.machines["p0"]
    seen: list[str] = []
    swarm.later(machine, 1.0, seen.append, "first")
    swarm.pause("p0")
    swarm.run(2.0)
    assert seen == []
    swarm.resume("p0")
    assert seen == ["first"]
    swarm.later(machine, 1.0, seen.append, "second")
    swarm.kill("p0")
    swarm.start("p0")
    swarm.run(2.0)
    assert seen == ["first"]


def test_a_crash_breaks_a_promise_and_a_full_disk_ends_the_process() -> None:
    swarm = founded(2)
    machine = swarm.machines["p0"]

    def fail(error: Exception) -> None:
        raise error

    for error in (ValueError("so"), StateError("a broken disk")):
        with pytest.raises(Violated, match="I9") as caught:
            swarm.act(machine, fail, error)
        assert caught.value.machine == "p0"
    machine.disk.is_full = True
    swarm.act(machine, fail, StateError("no room"))
    assert not machine.runs


def test_a_cut_link_is_dialled_again_once_both_ends_know() -> None:
    swarm = founded(2)
    swarm.cut(("p0", "p1"))
    assert swarm.machines["p1"].peer not in swarm.machines["p0"].links
    swarm.run(10.0)
    assert swarm.machines["p1"].peer in swarm.machines["p0"].links
    assert swarm.machines["p1"].peer in swarm.machines["p0"].running.linked


def test_links_of_the_dead_are_forgotten() -> None:
    swarm = founded(2)
    swarm.cut(("p0", "p1"))
    swarm.kill("p0")
    swarm.run(10.0)
    assert all("p0" not in pair for pair in swarm.network.links)
    assert swarm.machines["p0"].peer not in swarm.machines["p1"].running.linked
