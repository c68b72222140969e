"""Scripted scenes in the simulator, which runs the shipped nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from simulator.inspector import Violated
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.simulation import Simulation, play
from simulator.trace import Trace


async def test_peers_join_train_and_agree() -> None:
    async with Simulation(seed=1) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1")
        swarm.add("p2")
        await swarm.until(swarm.all_members, within=120.0)
        height = swarm.machines["p0"].height()
        await swarm.run(60.0)
        assert swarm.machines["p0"].height() > height
        assert swarm.inspector.checks > 100
        assert swarm.inspector.skipped == 0


async def test_killed_peer_comes_back_from_its_disk() -> None:
    async with Simulation(seed=2) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1")
        swarm.add("p2")
        await swarm.until(swarm.all_members, within=120.0)
        await swarm.run(60.0)
        swarm.kill("p1")
        await swarm.run(20.0)
        swarm.start("p1")
        await swarm.run(0.1)
        assert swarm.machines["p1"].height() > 0
        assert swarm.machines["p1"].running.me.incarnation > 1
        await swarm.until(swarm.all_members, within=120.0)


async def test_all_peers_lose_power_at_once_and_continue() -> None:
    names = ("p0", "p1", "p2")
    async with Simulation(seed=3) as swarm:
        for name in names:
            swarm.add(name, founds=name == "p0")
        await swarm.until(swarm.all_members, within=120.0)
        await swarm.run(60.0)
        for name in names:
            swarm.cut_power(name)
        await swarm.run(5.0)
        assert swarm.running() == []
        for name in names:
            swarm.start(name)
        await swarm.until(lambda: all(m.running.ready for m in swarm.running()), within=120.0)
        height = swarm.machines["p0"].height()
        await swarm.until(lambda: swarm.machines["p0"].height() > height, within=240.0)


async def test_sleeping_machine_misses_rounds_and_takes_part_again() -> None:
    async with Simulation(seed=4) as swarm:
        for name in ("p0", "p1", "p2", "p3"):
            swarm.add(name, founds=name == "p0")
        await swarm.until(swarm.all_members, within=120.0)
        height = swarm.machines["p3"].height()
        swarm.stop("p3", sleeps=True)
        await swarm.run(120.0)
        assert swarm.machines["p3"].height() == height
        assert swarm.machines["p0"].height() > height
        swarm.go_on("p3")
        await swarm.until(swarm.all_members, within=240.0)


async def test_peer_behind_a_router_dials_out_and_is_never_dialled() -> None:
    async with Simulation(seed=5) as swarm:
        swarm.add("p0", founds=True)
        swarm.add("p1", place=OUTBOUND_ONLY)
        swarm.add("p2", place=OUTBOUND_ONLY, believes_open=True)
        swarm.add("p3", place="home", believes_open=True)
        swarm.add("p4", place="home", believes_open=True)
        await swarm.run(40.0)
        peers = {name: machine.peer for name, machine in swarm.machines.items()}
        linked = {name: machine.running.linked for name, machine in swarm.machines.items()}
        assert peers["p0"] in linked["p1"] & linked["p2"] & linked["p3"]
        assert peers["p2"] not in linked["p1"] | linked["p3"]
        assert peers["p4"] in linked["p3"]
        assert swarm.network.can_dial(peers["p1"], peers["p0"])
        assert swarm.network.places[peers["p0"]] == OPEN


def test_trace_shows_what_arrived() -> None:
    async def scene() -> list[str]:
        trace = Trace()
        async with Simulation(seed=6, trace=trace) as swarm:
            swarm.add("p0", founds=True)
            swarm.add("p1")
            await swarm.run(60.0)
        return trace.last(count=10_000)

    lines = play(scene)
    assert any("p1" in line and "Opening(" in line for line in lines)
    assert not any("Heartbeat(" in line for line in lines)


async def test_error_in_a_node_is_a_violation() -> None:
    async with Simulation(seed=7) as swarm:
        machine = swarm.add("p0", founds=True)
        assert machine.island is not None
        machine.island.progress = None  # type: ignore[assignment, method-assign]
        with pytest.raises(Violated, match="I9"):
            await swarm.run(10.0)


DIGEST = """
from simulator.scenario import draw_scenario
from simulator.trial import play_scenario
from simulator.troubles import KINDS
print(*(play_scenario(draw_scenario(seed, (3, 6), frozenset(KINDS))).digest for seed in (9, 602)))
"""


def test_one_seed_gives_one_digest_in_any_process() -> None:
    """In 602 a clock is wrong; links are told of it."""
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST]
        digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1
    assert len(digests.pop()) > 32
