"""Our peers exchange over the real transport and end with the same bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.averaging.comparison import ComparisonPlan, play_turn, ready_pool
from benchmarks.averaging.systems import OURS
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.long,
    pytest.mark.wall_clock,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]


def test_three_peers_exchange_everything_and_hold_the_same_bytes(tmp_path: Path) -> None:
    plan = ComparisonPlan(systems=(OURS,), num_peers=3, parameters=1 << 16, codec="int4", spans=6, repeats=1)
    witness = Witness()
    with ready_pool(plan, OURS, tmp_path, show=lambda text: None) as pool:
        turns = [play_turn(pool, [], plan.turn_seconds) for _ in range(3)]
        witness.look()
        is_private = pool.network.is_private
    for turn in turns:
        assert turn.results_equal
        assert 0.0 < turn.wall_seconds < plan.turn_seconds
        if is_private:  # contributions to reducers and entries from owners: 2 (N - 1) / N vectors, and a few bytes
            vector = 0.53125 * 4 / 3
            assert vector <= turn.wire_bytes / plan.parameters / plan.num_peers < vector + 0.4
    witness.check_all_gone()
