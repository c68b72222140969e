"""The cost of a run's rosters for a joiner while members come and go: a small run, exact claims."""

from __future__ import annotations

from pathlib import Path

from simulator.roster_cost import RosterPlan, measure_rosters


def test_a_joiner_checks_every_roster_of_members_that_come_and_go(tmp_path: Path) -> None:
    cost = measure_rosters(RosterPlan(members=40, every=10, cycles=24), tmp_path)
    assert cost.rosters == 2 + 24, "the founding, who was there first, and one a cycle"
    assert cost.left == 4 * 24
    assert cost.joined == 4 * 23, "each comes back a cycle later"
    assert cost.fewest_members == 36
    assert cost.bytes_on_disk < 26 * (40 * 48 + 17 * 96 + 256)
    assert cost.frames == 2, "24 rosters are in one reply"
    assert 0 < cost.join_cpu_seconds < 5
    assert 0 < cost.start_cpu_seconds < 5
    assert cost.is_within(most_bytes=cost.bytes_on_disk, most_seconds=cost.join_cpu_seconds)
    assert not cost.is_within(most_bytes=cost.bytes_on_disk - 1, most_seconds=cost.join_cpu_seconds)
    assert not cost.is_within(most_bytes=cost.bytes_on_disk, most_seconds=0.0)
