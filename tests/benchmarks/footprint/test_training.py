"""Training alone makes the steps that it is told to make."""

from __future__ import annotations

from benchmarks.footprint.play import FootprintPlan, orders_of
from benchmarks.footprint.training import TrainingAlone


def test_steps_are_made_and_the_loss_can_be_measured() -> None:
    order = orders_of(FootprintPlan(num_peers=1, parameters=(200_000,)), 200_000)[0]
    alone = TrainingAlone(order)
    assert alone.train(2) == {"steps": 2}
    alone.evaluate()
    assert alone.train(0) == {"steps": 2}
    alone.close()
