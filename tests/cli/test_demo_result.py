"""The verdict on a demo."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoOptions, plan_demo
from p2p_diloco.cli.demo_result import DemoResult, TextLosses, Traces, judge_demo
from p2p_diloco.cli.demo_swarm import DemoStory
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import ByteCounts, PeerStatus

PLAN = plan_demo(DemoOptions(peers=4), now_seconds=0.0)
FINAL = PeerStatus(
    phase="finished",
    ready=True,
    state_digest="cd" * 32,
    updated=100.0,
    parameters=1_000,
    vector_cycles=10.0,
    rounds_closed=20,
    participation=0.95,
    inner_steps=50,
    tokens=500,
    bytes_sent=ByteCounts(vectors=8_000, control=900, transfer=70),
)


def evaluation(time: float, loss: float) -> PeerEvent:
    return PeerEvent(time=time, topic="evaluation", text="", figures={"anchor_loss": loss, "local_loss": loss + 0.1})


def good_traces() -> dict[str, Traces]:
    events = (
        PeerEvent(time=30.0, topic="ready", text=""),
        evaluation(31.0, 5.5),
        evaluation(99.0, 2.1),
    )
    traces = {name: Traces(status=FINAL, events=events, started=10.0) for name in PLAN.peers}
    traces[PLAN.victim] = Traces(status=replace(FINAL, phase="training", state_digest=""), events=(), started=10.0)
    traces[BOOTSTRAP] = Traces(status=PeerStatus(role="bootstrap"), events=(), started=1.0)
    return traces


def good_story() -> DemoStory:
    codes = {name: 0 for name in PLAN.peers if name != PLAN.victim}
    return DemoStory(killed={PLAN.victim: 50.0, BOOTSTRAP: 60.0}, exit_codes=codes)


def judged(traces: dict[str, Traces], story: DemoStory | None = None, baseline: float = 2.4) -> DemoResult:
    return judge_demo(PLAN, story or good_story(), traces, TextLosses(start=5.545, bigram=baseline))


def test_a_demo_that_meets_all_expectations_has_no_failures() -> None:
    result = judged(good_traces())
    assert result.failures == ()
    assert (result.heads_equal, result.head, result.peers_final) == (True, "cd" * 32, 3)
    assert (result.rounds, result.cycles, result.participation) == (20, 10.0, 0.95)
    assert (result.loss_first, result.loss_last, result.lone_loss) == (5.545, 2.1, None)
    assert result.bytes_sent_per_parameter_per_cycle == pytest.approx(0.8)
    assert result.control_bytes_per_second == pytest.approx(10.0)
    assert result.transfer_bytes == 210
    assert (result.inner_steps, result.tokens) == (200, 2_000)
    assert (result.killed, result.joined_late, result.joined_late_ready_seconds) == (("peer-2",), ("peer-4",), 20.0)
    assert result.bootstrap_killed


def test_the_document_is_json_with_every_figure() -> None:
    document = json.loads(json.dumps(judged(good_traces()).document(), allow_nan=False))
    assert set(document) >= set(
        "heads_equal head rounds cycles grid_rows peers_final participation loss_first loss_last lone_loss "
        "baseline_loss bytes_sent_per_parameter_per_cycle control_bytes_per_second transfer_bytes inner_steps killed "
        "joined_late joined_late_ready_seconds bootstrap_killed".split()
    )
    assert document["killed"] == ["peer-2"]


def test_one_peer_with_other_bytes_is_a_failure() -> None:
    traces = good_traces()
    traces["peer-3"] = replace(traces["peer-3"], status=replace(FINAL, state_digest="ef" * 32))
    result = judged(traces)
    assert (result.heads_equal, result.head) == (False, None)
    assert result.failures == ("the peers ended with different bytes",)


@pytest.mark.parametrize("status", [None, replace(FINAL, phase="leaving"), replace(FINAL, state_digest="")])
def test_a_peer_that_did_not_finish_is_a_failure_and_breaks_equality(status: PeerStatus | None) -> None:
    traces = good_traces()
    traces["peer-3"] = replace(traces["peer-3"], status=status)
    result = judged(traces)
    assert not result.heads_equal
    assert result.peers_final == 2
    assert result.failures == ("peer-3 did not finish",)


def test_a_loss_that_did_not_fall_below_the_baseline_is_a_failure() -> None:
    result = judged(good_traces(), baseline=2.0)
    assert result.failures == ("the loss of the anchor is 2.100; expected less than the bigram entropy, 2.000",)


def test_the_worst_last_measurement_counts() -> None:
    traces = good_traces()
    traces["peer-1"] = replace(traces["peer-1"], events=(evaluation(31.0, 5.5), evaluation(99.0, 2.3)))
    assert judged(traces).loss_last == 2.3


def test_a_demo_without_kills_fails() -> None:
    result = judged(good_traces(), DemoStory())
    assert result.failures[-2:] == (
        "peer-2 was not killed; it exited earlier",
        "the bootstrap was not killed; it exited earlier",
    )


def test_a_late_peer_that_was_never_ready_and_a_peer_that_failed_are_failures() -> None:
    traces, story = good_traces(), good_story()
    traces["peer-4"] = replace(traces["peer-4"], events=(evaluation(99.0, 2.1),))
    story.exit_codes["peer-1"] = 4
    assert judged(traces, story).failures == (
        "peer-4 joined late and was never ready",
        "peer-1 exited with code 4",
    )


def test_a_demo_without_measurements_fails() -> None:
    traces = {name: replace(trace, events=()) for name, trace in good_traces().items()}
    result = judged(traces)
    assert (result.loss_first, result.loss_last) == (5.545, None)
    assert "no peer measured the anchor's loss at the end" in result.failures


def test_a_lone_island_is_measured_by_its_own_parameters() -> None:
    traces = good_traces()
    traces[LONE] = Traces(status=None, events=(evaluation(99.0, 2.6),), started=0.0)
    assert judged(traces).lone_loss == pytest.approx(2.7)


def test_an_empty_demo_has_failures_but_does_not_crash() -> None:
    result = judged({}, DemoStory())
    assert (result.peers_final, result.heads_equal, result.participation) == (0, False, None)
    assert result.bytes_sent_per_parameter_per_cycle is None
