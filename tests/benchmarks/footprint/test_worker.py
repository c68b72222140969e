"""Each kind of process of this bench has its class."""

from __future__ import annotations

from benchmarks.footprint.play import FootprintPlan, orders_of
from benchmarks.footprint.worker import ALONE, PEER, make_worker

ORDER = orders_of(FootprintPlan(num_peers=1, parameters=(200_000,)), 200_000)[0]


def test_each_system_has_its_class() -> None:
    made = {name: make_worker({**ORDER, "system": name, "place": 0, "folder": "unused"}) for name in (PEER, ALONE)}
    assert {name: type(worker).__name__ for name, worker in made.items()} == {
        PEER: "SwarmPeer",
        ALONE: "TrainingAlone",
    }
