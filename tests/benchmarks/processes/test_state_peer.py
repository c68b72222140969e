"""A newcomer fetches everything from real donors over the real transport, although one is killed half-way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.state.transfer import TransferPlan, play_transfer

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]


@pytest.mark.parametrize("killed", [0, 1])
def test_all_bytes_arrive_once_and_equal_although_a_donor_is_killed(killed: int, tmp_path: Path) -> None:
    plan = TransferPlan(megabytes=40, donors=3, killed=killed, repeats=1)
    transfer = play_transfer(plan, tmp_path)
    assert transfer.is_equal
    assert transfer.received_bytes < 1.05 * plan.megabytes * 1e6, "resumed, not restarted"
    assert 0.0 < transfer.installed_seconds <= transfer.seconds < 30.0
    assert transfer.peak_joiner_bytes > plan.megabytes * 1e6
