"""gloo's ranks end with the same bytes, and their traffic is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.averaging.comparison import ComparisonPlan, play_turn, ready_pool
from benchmarks.averaging.systems import GLOO, OURS
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]

PLAN = ComparisonPlan(systems=(OURS, GLOO), num_peers=2, parameters=1 << 16, codec="int4", spans=4, repeats=1)


def test_two_ranks_average_in_float32(tmp_path: Path) -> None:
    witness = Witness()
    with ready_pool(PLAN, GLOO, tmp_path, show=lambda text: None) as pool:
        turn = play_turn(pool, [], PLAN.turn_seconds)
        witness.look()
        if pool.network.is_private:
            assert 4.0 <= turn.wire_bytes / PLAN.parameters / PLAN.num_peers < 4.5
    assert turn.results_equal
    assert 0.0 < turn.wall_seconds < 60.0
    assert 0.0 < turn.cpu_seconds < 60.0
    witness.check_all_gone()
