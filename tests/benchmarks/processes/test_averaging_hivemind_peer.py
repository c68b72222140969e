"""hivemind's averager forms its group, averages, and ends with all its processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.averaging.comparison import ComparisonPlan, play_turn, ready_pool
from benchmarks.averaging.systems import HIVEMIND_FLOAT16, OURS
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]

PLAN = ComparisonPlan(
    systems=(OURS, HIVEMIND_FLOAT16), num_peers=2, parameters=1 << 16, codec="int4", spans=4, repeats=1
)


def test_two_peers_average_in_float16_in_their_own_processes(tmp_path: Path) -> None:
    witness = Witness()
    with ready_pool(PLAN, HIVEMIND_FLOAT16, tmp_path, show=lambda text: None) as pool:
        turn = play_turn(pool, [], PLAN.turn_seconds)
        witness.look()
        assert min(map(len, pool.pids_by_peer())) >= 4, "worker, DHT, averager and daemon"
        if pool.network.is_private:
            assert 2.0 <= turn.wire_bytes / PLAN.parameters / PLAN.num_peers < 2.6
    assert 0.0 < turn.wall_seconds < 60.0
    witness.check_all_gone()
