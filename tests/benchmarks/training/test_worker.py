"""Each system has its island; only its own libraries are imported."""

from __future__ import annotations

import sys

import pytest

from benchmarks.training.our_run import RunShape, run_order
from benchmarks.training.worker import make_island

RUN = run_order(RunShape(codec="int4", fragments=2, spans_per_fragment=2, model="tiny"), cycle_seconds=4.0)


def test_an_island_of_torchft_is_made_without_it() -> None:
    order = {"system": "torchft", "place": 1, "num_islands": 2, "address": "10.0.0.1", "sync_every": 3, **RUN}
    island = make_island(order)
    assert type(island).__name__ == "TorchftIsland"
    assert "torchft" not in sys.modules
    assert island.do({"do": "start"}) == {}
    with pytest.raises(ValueError, match="unknown command 'dance'"):
        island.do({"do": "dance"})
    island.close()
