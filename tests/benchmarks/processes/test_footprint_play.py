"""Memory of real peers that train and exchange, compared with training alone."""

from __future__ import annotations

import sys

import pytest

from benchmarks.footprint.figures import MIB
from benchmarks.footprint.play import FRAGMENTS, ROUNDS_FIRST, ROUNDS_MORE, FootprintPlan, measure_footprints
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]


def test_two_peers_exchange_and_use_no_more_memory_than_expected() -> None:
    witness = Witness()
    size, *more = measure_footprints(FootprintPlan(num_peers=2, parameters=(4_000_000,)), lambda text: witness.look())
    assert not more
    assert size.parameters == pytest.approx(4_000_000, rel=0.03)
    assert size.results_equal
    assert size.num_rounds >= ROUNDS_FIRST + ROUNDS_MORE >= FRAGMENTS
    assert size.num_entries >= size.num_rounds
    assert len(size.peers) == 2
    for peer in size.peers:
        assert peer.peer.peak >= peer.peer.steady > size.alone.steady
        assert 20 * MIB < peer.daemon.peak < 200 * MIB
    witness.check_all_gone()
