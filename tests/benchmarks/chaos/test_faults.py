"""Faults are drawn by their seed alone, evenly over kinds, and never end the island whose memory is watched."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos.faults import BOOTSTRAP, KINDS, SPARED, Fault, draw_faults, kinds_named
from p2p_diloco.errors import ConfigError

ALL = tuple(KINDS)


def drawn(seed: int = 1, islands: int = 8, seconds: float = 1800.0, kinds: tuple[str, ...] = ALL) -> tuple[Fault, ...]:
    return draw_faults(seed=seed, islands=islands, seconds=seconds, every=30.0, kinds=kinds)


def test_a_seed_always_draws_the_same_faults_and_another_seed_others() -> None:
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_there_is_a_fault_at_each_interval_within_the_measured_time() -> None:
    assert [fault.at for fault in drawn(seconds=125.0)] == [30.0, 60.0, 90.0, 120.0]
    assert drawn(seconds=30.0) == ()


def test_all_kinds_are_about_equally_frequent() -> None:
    counts = Counter(fault.kind for fault in drawn(seconds=30.0 * (4 * len(ALL) + 1)))
    assert set(counts.values()) == {4}


def test_kinds_that_end_processes_spare_one_island_of_three_or_more() -> None:
    ended = [fault for seed in range(20) for fault in drawn(seed, islands=3) if KINDS[fault.kind].ends_process]
    assert {fault.victim for fault in ended} == {BOOTSTRAP, 2, 3}
    others = [fault for seed in range(20) for fault in drawn(seed, islands=3) if not KINDS[fault.kind].ends_process]
    assert {fault.victim for fault in others} == {1, 2, 3}


def test_of_two_islands_both_are_killed() -> None:
    kills = drawn(islands=2, kinds=("kill",))
    assert {fault.victim for fault in kills} == {SPARED, 2}


def test_only_the_kind_of_that_name_hits_the_bootstrap_peer() -> None:
    for fault in drawn():
        assert (fault.victim == BOOTSTRAP) == (fault.kind == "bootstrap")
    without = draw_faults(seed=1, islands=8, seconds=1800.0, every=30.0, kinds=ALL, has_bootstrap=False)
    assert "bootstrap" not in {fault.kind for fault in without}


def test_a_fault_is_described_with_its_figures() -> None:
    assert Fault(at=0.0, kind="cut", victim=2, seconds=12.4, other=3).text == "is cut off from island-3 for 12 s"
    assert Fault(at=0.0, kind="cut-in", victim=2, seconds=5.0).text == "receives nothing from all others for 5 s"
    assert "+600 s ahead for 60 s" in Fault(at=0.0, kind="clock", victim=1, seconds=60.0, ahead=600.0).text


@pytest.mark.parametrize("text", ["", " , ", "kill,nap"])
def test_unknown_kinds_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="expected all, or some of kill, daemon"):
        kinds_named(text)


def test_kinds_are_named_by_a_list_or_all_at_once() -> None:
    assert kinds_named("all") == ALL
    assert kinds_named("stop, kill,stop") == ("stop", "kill")
