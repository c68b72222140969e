"""hivemind's averager forms its group, averages, and goes with all its processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.averaging.contest import ContestPlan, play_turn, ready_crew
from benchmarks.averaging.systems import HIVEMIND_FLOAT16, OURS
from tests.swarm.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]

PLAN = ContestPlan(systems=(OURS, HIVEMIND_FLOAT16), num_peers=2, parameters=1 << 16, codec="int4", spans=4, repeats=1)


def test_two_peers_average_in_float16_over_processes_of_their_own(tmp_path: Path) -> None:
    witness = Witness()
    with ready_crew(PLAN, HIVEMIND_FLOAT16, tmp_path, say=lambda text: None) as crew:
        turn = play_turn(crew, [], PLAN.turn_seconds)
        witness.look()
        assert min(map(len, crew.pids_by_peer())) >= 4, "worker, DHT, averager and daemon"
        if crew.network.is_private:
            assert 2.0 <= turn.wire_bytes / PLAN.parameters / PLAN.num_peers < 2.6
    assert 0.0 < turn.wall_seconds < 60.0
    witness.check_all_gone()
