"""A whole benchmark of two systems with few parameters, and one in which a peer is killed."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from benchmarks.averaging import comparison
from benchmarks.averaging.comparison import ComparisonPlan, run_comparison
from benchmarks.averaging.figures import document_of
from benchmarks.averaging.systems import GLOO, OURS
from p2p_diloco.errors import PeerError
from tests.benchmarks.processes.bench_processes import Witness

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc"),
]

PLAN = ComparisonPlan(systems=(OURS, GLOO), num_peers=2, parameters=1 << 16, codec="int4", spans=4, repeats=2)


@pytest.mark.parametrize("stays", [True, False])
def test_systems_take_turns_and_no_process_is_left(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "can_all_stay", lambda *words: stays)
    plan = PLAN if stays else replace(PLAN, repeats=1)  # starting takes long
    witness, said = Witness(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        witness.look()

    played = run_comparison(plan, say)
    turns = [text.split()[4] for text in said if text.startswith("repeat")]
    assert turns == [OURS, GLOO] * plan.repeats
    document = document_of(played)
    assert document["processes_kept_alive"] is stays
    assert (document["peers"], document["parameters"], document["repeats"]) == (2, 1 << 16, plan.repeats)
    for system in document["systems"].values():
        assert system["results_equal"] is True
        assert min(system["wall_seconds"], system["cpu_ns_per_parameter_per_peer"], system["peak_rss_mib"]) > 0
    assert document["idle_cores"] < 0.5
    witness.check_all_gone()


def test_a_peer_that_dies_ends_the_benchmark_with_a_sentence_and_all_processes() -> None:
    witness = Witness()

    def say(text: str) -> None:
        witness.look()
        if text.startswith("repeat 1 of 2: gloo"):
            workers = [p for p in witness.seen if p.is_running() and "benchmarks.worker" in p.cmdline()]
            min(workers, key=lambda process: process.create_time()).kill()

    with pytest.raises(PeerError, match=r"peer \d of p2p_diloco was killed by signal 9 during 'prepare'"):
        run_comparison(PLAN, say)
    witness.check_all_gone()


def test_an_opponent_that_dies_is_restarted() -> None:
    witness, said = Witness(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        witness.look()
        if text.startswith("repeat 1 of 2: p2p_diloco"):
            workers = [p for p in witness.seen if p.is_running() and "benchmarks.worker" in p.cmdline()]
            max(workers, key=lambda process: process.create_time()).kill()

    played = run_comparison(PLAN, say)
    assert [len(turns) for turns in played.turns.values()] == [2, 2]
    assert sum(text.endswith("starting gloo_fp32 again") for text in said) == 1
    witness.check_all_gone()
