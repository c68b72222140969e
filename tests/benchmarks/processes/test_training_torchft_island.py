"""Replicas of torchft's DiLoCo find each other and exchange at the end of each cycle."""

from __future__ import annotations

import sys

import pytest

from benchmarks.training.figures import TORCHFT
from benchmarks.training.our_run import RunShape
from benchmarks.training.play import TrainingPlan, ready_islands
from benchmarks.training.torchft_environment import torchft_interpreter
from benchmarks.training.uplinks import Uplink
from p2p_diloco.errors import ConfigError
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]


def test_replicas_exchange_after_the_given_number_of_steps() -> None:
    try:
        interpreter = torchft_interpreter()
    except ConfigError as error:
        pytest.skip(str(error))
    plan = TrainingPlan(
        systems=(TORCHFT,),
        uplinks=(Uplink(name="unlimited"),),
        num_islands=2,
        shape=RunShape(codec="int4", fragments=2, spans_per_fragment=4, model="tiny"),
        repeats=1,
        torchft_interpreter=interpreter,
    )
    witness = Witness()
    with ready_islands(plan, TORCHFT, 4.0, show=lambda text: None, sync_every=3) as islands:
        alone, exchanging = islands.train(1.0), islands.exchange(2)
        witness.look()
    for island in exchanging:
        assert island.steps == pytest.approx(6.0)
        assert (island.included, island.due) == (2.0, 2.0)
    assert all(island.steps > 0.0 for island in alone)
    witness.check_all_gone()
