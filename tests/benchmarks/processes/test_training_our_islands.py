"""Islands train all the time and exchange on request; a blocking island waits for the exchange."""

from __future__ import annotations

import sys

import pytest

from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, Window, steps_per_second
from benchmarks.training.our_run import RunShape
from benchmarks.training.play import TrainingPlan, ready_islands
from benchmarks.training.uplinks import Uplink
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]

CYCLE_SECONDS = 6.0
PLAN = TrainingPlan(
    systems=(OURS, BLOCKING),
    uplinks=(Uplink(name="unlimited"),),
    num_islands=2,
    shape=RunShape(codec="int4", fragments=2, spans_per_fragment=4, model="tiny"),
    repeats=1,
)


def windows_of(system: str, bits_per_second: float | None) -> tuple[Window, Window, float | None]:
    witness = Witness()
    with ready_islands(PLAN, system, CYCLE_SECONDS, show=lambda text: None) as islands:
        witness.look()
        taken = islands.transmit()
        islands.gather()
        islands.network.set_uplinks(bits_per_second)
        exchanging, alone = islands.exchange(1), islands.train(2.0)
    witness.check_all_gone()
    return exchanging, alone, taken


@pytest.mark.parametrize("system", [OURS, OWN_LOOP])
def test_islands_continue_training_while_they_exchange(system: str) -> None:
    exchanging, alone, taken = windows_of(system, None)
    assert taken is not None
    assert 0.0 < taken < CYCLE_SECONDS
    assert [island.due for island in exchanging] == [2.0, 2.0]
    assert sum(island.included for island in exchanging) > 0.0
    assert all(island.work.outer > 0.0 and island.work.daemon > 0.0 for island in exchanging)
    assert all(island.steps > 0.0 and island.work.outer == 0.0 for island in alone)


def test_a_blocking_island_waits_for_a_thin_line() -> None:
    # Half a million parameters at 8.5 bits take more than four of the six seconds.
    exchanging, alone, _ = windows_of(BLOCKING, 1e6)
    assert steps_per_second(exchanging) < 0.8 * steps_per_second(alone)
    assert min(island.steps for island in alone) > 0.0
