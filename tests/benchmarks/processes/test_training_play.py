"""A whole benchmark of a small model on a thin line: every system has a row, and no process is left."""

from __future__ import annotations

import sys

import pytest

from benchmarks.training import play
from benchmarks.training.figures import BLOCKING, OURS, document_of
from benchmarks.training.our_run import RunShape
from benchmarks.training.play import TrainingPlan, play_training
from benchmarks.training.uplinks import Uplink
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]


def test_each_system_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "WINDOW_SECONDS", 3.0)
    plan = TrainingPlan(
        systems=(OURS, BLOCKING),
        uplinks=(Uplink(name="5mbit", bits_per_second=5e6),),
        num_islands=2,
        shape=RunShape(codec="int4", fragments=1, spans_per_fragment=8, model="tiny"),
        repeats=1,
    )
    witness, said = Witness(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        witness.look()

    played = play_training(plan, say)
    document = document_of(played.setting, played.rows)
    rows = {(row["uplink"], row["system"]): row for row in document["rows"]}
    assert set(rows) == {(uplink.name, system) for uplink in plan.uplinks for system in plan.systems}
    # A million parameters at 4.25 bits each way, half of them to the other island.
    assert rows["5mbit", OURS]["transmission_seconds"] == pytest.approx(0.85 * document["parameters"] / 1e6, rel=0.03)
    for row in rows.values():
        assert row["cycle_seconds"] == pytest.approx(4 * row["transmission_seconds"])
        assert 0.0 < row["speed_kept"] < 2.0
        assert 0.0 <= row["participation"] <= 1.0
        assert row["inner_steps_per_cycle"] > 0.0
    assert played.failures == ()
    witness.check_all_gone()
