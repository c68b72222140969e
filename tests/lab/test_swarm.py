"""A scripted swarm: founded, killed, put to sleep, split."""

from __future__ import annotations

import pytest
from lab_swarms import founded

from p2p_diloco.lab.stage import Violated
from p2p_diloco.lab.trace import Trace


def test_a_member_that_dies_is_taken_off_and_comes_back() -> None:
    swarm = founded(3)
    swarm.kill("p1")
    swarm.run_until(swarm.all_members, 120.0)
    assert swarm.members("p0") == {"p0", "p2"}
    swarm.start("p1")
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 120.0)
    assert swarm.height("p1") > 0


def test_a_split_heals_and_all_agree() -> None:
    swarm = founded(3)
    swarm.partition(["p0"], ["p1", "p2", "boot"])
    swarm.run_until(lambda: swarm.members("p1") == {"p1", "p2"}, 120.0)
    swarm.heal()
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 120.0)


def test_a_claim_that_does_not_come_true_says_where_all_stand() -> None:
    swarm = founded(1)
    with pytest.raises(Violated, match=r"not within 1.0 s; second .*\n  boot: roster"):
        swarm.run_until(lambda: False, 1.0)
    swarm.kill("p0")
    assert "p0: not running" in swarm.describe()


def test_a_peer_on_a_full_disk_does_not_start_and_a_wiped_one_is_new() -> None:
    swarm = founded(3, trace=Trace())
    machine = swarm.machines["p1"]
    swarm.kill("p1")
    machine.disk.is_full = True
    assert not swarm.start("p1").runs
    machine.disk.is_full = False
    swarm.start("p1", keep_disk=False)
    assert not machine.remembers
    assert machine.running.me.incarnation == 2
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 120.0)


def test_a_founder_that_dies_before_anybody_is_certified_founds_again() -> None:
    swarm = founded(1)
    fresh = type(swarm)(1, start=-10.0, rules=swarm.rules, maths=swarm.maths, trace=None)
    fresh.add("boot", trains=False, found=True)
    fresh.run(1.0)
    fresh.kill("boot")
    fresh.start("boot")
    fresh.add("p0")
    fresh.run_until(lambda: fresh.all_members() and fresh.agreed(), 60.0)


def test_bits_flip_only_where_something_is_held() -> None:
    swarm = founded(1)
    swarm.kill("p0")
    assert not swarm.flip_bit("p0", swarm.spans[0], 0, 20)
