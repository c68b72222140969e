"""Curves and tables of the demo, made from traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoOptions, plan_demo
from p2p_diloco.cli.demo_report import demo_report, figure_rows, peer_rows, verdict_line
from p2p_diloco.cli.demo_result import TextLosses, Traces, judge_demo
from p2p_diloco.cli.demo_swarm import DemoStory, Mark
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.report import format_report
from p2p_diloco.status.status_file import PeerStatus

PLAN = plan_demo(DemoOptions(peers=3), now_seconds=0.0)
START = PLAN.clock_start


def evaluation(seconds: float, loss: float, tokens: int) -> PeerEvent:
    figures = {"anchor_loss": loss, "local_loss": loss - 0.1, "tokens": tokens}
    return PeerEvent(time=START + seconds, topic="evaluation", text="", figures=figures)


def trace(*events: PeerEvent) -> Traces:
    status = PeerStatus(phase="finished", state_digest="cd" * 32, peer="12D3KooWabcd", tokens=400, updated=START + 40)
    return Traces(status=status, events=events, started=START)


TRACES = {
    "peer-1": trace(evaluation(10, 5.0, 100), evaluation(20, 4.0, 200)),
    "peer-2": trace(evaluation(20, 4.0, 300)),
    "peer-3": Traces(status=None, events=(), started=START + 5),
    LONE: trace(evaluation(20, 4.5, 50)),
    BOOTSTRAP: Traces(status=PeerStatus(role="bootstrap"), events=(), started=START - 5),
}
STORY = DemoStory(marks=[Mark(time=START + 20, text="peer-2 is killed")], killed={"peer-2": START + 20})
RESULT = judge_demo(PLAN, STORY, TRACES, TextLosses(start=5.545, bigram=2.4))


def test_the_anchor_is_measured_by_all_peers_and_each_peer_by_itself() -> None:
    curves = {curve.name: curve for curve in demo_report(PLAN, STORY, TRACES, RESULT).curves}
    assert [point.loss for point in curves["anchor"].points] == [5.545, 5.0, 4.0, 4.0]
    assert [point.loss for point in curves["peer-1"].points] == pytest.approx([4.9, 3.9])
    assert curves["peer-3"].points == ()
    assert {curve.name: curve.kind for curve in curves.values()} == {
        "peer-1": "peer",
        "peer-2": "peer",
        "peer-3": "peer",
        "anchor": "anchor",
        "alone": "lone",
    }


def test_tokens_are_those_of_the_whole_swarm_at_that_time() -> None:
    report = demo_report(PLAN, STORY, TRACES, RESULT)
    curves = {curve.name: curve for curve in report.curves}
    # At 10 s: 100 of peer-1, and half of the 300 that peer-2 had at 20 s.
    assert [point.tokens for point in curves["peer-1"].points] == pytest.approx([250.0, 500.0])
    assert [point.tokens for point in curves["alone"].points] == pytest.approx([50.0])
    assert report.moments[0].tokens == pytest.approx(500.0)
    assert report.moments[0].seconds == pytest.approx(20.0)


def test_the_whole_report_is_formatted_as_a_page() -> None:
    page = format_report(demo_report(PLAN, STORY, TRACES, RESULT))
    assert page.count("peer-2 is killed</title>") == 2


def test_every_process_has_a_row() -> None:
    rows = {row[0]: row for row in peer_rows(PLAN, STORY, TRACES)}
    assert list(rows) == [BOOTSTRAP, "peer-1", "peer-2", "peer-3", LONE]
    assert rows["peer-2"][2] == "killed at 20 s"
    assert rows["peer-1"][2] == "finished"


def test_the_lone_island_has_a_figure_only_if_it_was_measured() -> None:
    assert ("an island alone", "4.400") in figure_rows(RESULT)
    assert "an island alone" not in dict(figure_rows(replace(RESULT, lone_loss=None)))


def test_the_verdict_names_failures_or_what_was_survived() -> None:
    assert verdict_line(RESULT).startswith("failed: peer-3 did not finish")
    good = replace(RESULT, failures=(), peers_final=3, loss_first=5.5, loss_last=2.1)
    assert verdict_line(good).startswith("all 3 living peers hold the same bytes")
    assert "from 5.500 to 2.100 (bigram entropy 2.404)" in verdict_line(replace(good, baseline_loss=2.404))
