"""Turn a demo's traces into curves, moments and tables, for the report and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoPlan
from p2p_diloco.cli.demo_result import DemoResult, Traces
from p2p_diloco.cli.demo_swarm import DemoStory
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.report import LossCurve, LossPoint, Moment, Report, Sheet
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import (
    NOTHING,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_share,
    short_peer,
)

PEER_COLUMNS = ("process", "peer", "end", "steps", "loss", "anchor", "included", "sent", "state")

_Clock = Callable[[float], float]
"""Maps Unix seconds to tokens."""


def demo_report(plan: DemoPlan, story: DemoStory, traces: Mapping[str, Traces], result: DemoResult) -> Report:
    """Return the report of a demo."""
    volunteers = {name: traces[name] for name in plan.peers if name in traces}
    clocks = [_token_clock(trace) for trace in volunteers.values()]

    def swarm_tokens(time: float) -> float:
        return sum(_at(clock, time) for clock in clocks)

    return Report(
        title=f"p2p_diloco demo: {plan.options.peers} peers, {format_seconds(plan.end_at)}, model {plan.options.model}",
        verdict=verdict_line(result),
        good=not result.failures,
        curves=_curves(plan, traces, swarm_tokens, result),
        moments=tuple(
            Moment(seconds=mark.time - plan.clock_start, tokens=swarm_tokens(mark.time), text=mark.text)
            for mark in story.marks
        ),
        baseline_loss=result.baseline_loss,
        sheets=(
            Sheet(title="Figures", columns=("what", "figure"), rows=figure_rows(result)),
            Sheet(title="Peers", columns=PEER_COLUMNS, rows=peer_rows(plan, story, traces)),
        ),
        footnote=f"made by: p2p-diloco demo --peers {plan.options.peers} --seconds {plan.options.seconds:g} "
        f"--model {plan.options.model}",
    )


def verdict_line(result: DemoResult) -> str:
    """Return the verdict in one sentence."""
    if result.failures:
        return f"failed: {'; '.join(result.failures)}"
    return (
        f"all {result.peers_final} living peers hold the same bytes; the anchor's held-out loss fell from "
        f"{format_loss(result.loss_first)} to {format_loss(result.loss_last)} (bigram entropy "
        f"{format_loss(result.baseline_loss)}); the run survived a killed volunteer, a late join and a killed bootstrap"
    )


def figure_rows(result: DemoResult) -> tuple[tuple[str, str], ...]:
    """Return the figures as (name, value) rows for people."""
    per_parameter = result.bytes_sent_per_parameter_per_cycle
    rows = [
        ("same bytes", "yes" if result.heads_equal else "no"),
        ("SHA-256 of anchor and momentum", result.head or NOTHING),
        ("rounds, cycles", f"{result.rounds}, {result.cycles:g}"),
        ("averaging groups", "one" if result.grid_rows <= 1 else f"{result.grid_rows} rows, then one of their means"),
        ("contributions included", format_share(result.participation)),
        ("anchor, held-out loss", f"{format_loss(result.loss_first)} → {format_loss(result.loss_last)}"),
        ("bigram entropy", format_loss(result.baseline_loss)),
        ("bytes sent per parameter and cycle", NOTHING if per_parameter is None else f"{per_parameter:.3f}"),
        ("control traffic sent by a peer", f"{format_bytes(result.control_bytes_per_second)}/s"),
        ("state sent to newcomers", format_bytes(result.transfer_bytes)),
        ("inner steps, tokens", f"{format_count(result.inner_steps)}, {format_count(result.tokens)}"),
        ("late peer ready after", format_seconds(result.joined_late_ready_seconds)),
    ]
    if result.lone_loss is not None:
        rows.insert(6, ("an island alone", format_loss(result.lone_loss)))
    return tuple(rows)


def peer_rows(plan: DemoPlan, story: DemoStory, traces: Mapping[str, Traces]) -> tuple[tuple[str, ...], ...]:
    """Return one row per process."""
    names = [name for name in (BOOTSTRAP, *plan.peers, LONE) if name in traces]
    return tuple(_peer_row(plan, story, name, traces[name].status) for name in names)


def _peer_row(plan: DemoPlan, story: DemoStory, name: str, status: PeerStatus | None) -> tuple[str, ...]:
    killed = story.killed.get(name)
    end = f"killed at {killed - plan.clock_start:.0f} s" if killed is not None else status.phase if status else NOTHING
    if status is None:
        return (name, NOTHING, end, *([NOTHING] * (len(PEER_COLUMNS) - 3)))
    sent = status.bytes_sent.vectors + status.bytes_sent.control + status.bytes_sent.transfer
    return (
        f"{name} (late)" if name == plan.late else name,
        short_peer(status.peer),
        end,
        format_count(status.inner_steps),
        format_loss(status.local_loss),
        format_loss(status.anchor_loss),
        format_share(status.participation),
        format_bytes(sent),
        status.state_digest[:8] or NOTHING,
    )


def _curves(
    plan: DemoPlan, traces: Mapping[str, Traces], swarm_tokens: _Clock, result: DemoResult
) -> tuple[LossCurve, ...]:
    volunteers = {name: traces[name] for name in plan.peers if name in traces}
    curves = [
        LossCurve(name=name, kind="peer", points=_points(plan, trace.evaluations(), "local_loss", swarm_tokens))
        for name, trace in volunteers.items()
    ]
    # All peers hold the same anchor, so any peer's measurement counts.
    evaluations = sorted((e for trace in volunteers.values() for e in trace.evaluations()), key=lambda e: e.time)
    anchor = _points(plan, evaluations, "anchor_loss", swarm_tokens)
    start = LossPoint(seconds=0.0, tokens=0.0, loss=result.loss_first)
    curves.append(LossCurve(name="anchor", kind="anchor", points=(start, *anchor)))
    if LONE in traces:
        own = _token_clock(traces[LONE])
        points = _points(plan, traces[LONE].evaluations(), "local_loss", lambda time: _at(own, time))
        curves.append(LossCurve(name="alone", kind="lone", points=points))
    return tuple(curves)


def _points(
    plan: DemoPlan, evaluations: tuple[PeerEvent, ...] | list[PeerEvent], name: str, tokens_at: _Clock
) -> tuple[LossPoint, ...]:
    return tuple(
        LossPoint(seconds=event.time - plan.clock_start, tokens=tokens_at(event.time), loss=float(loss))
        for event in evaluations
        if isinstance(loss := event.figures.get(name), int | float)
    )


def _token_clock(trace: Traces) -> list[tuple[float, float]]:
    """Return (Unix seconds, tokens of this peer by then), from the start of the process to its last status."""
    known = [(trace.started, 0.0)]
    known += [
        (event.time, float(tokens))
        for event in trace.evaluations()
        if isinstance(tokens := event.figures.get("tokens"), int | float)
    ]
    if trace.status is not None and trace.status.updated > known[-1][0]:
        known.append((trace.status.updated, float(trace.status.tokens)))
    return known


def _at(clock: list[tuple[float, float]], time: float) -> float:
    """Interpolate a token clock at `time`; it is constant before the first mark and after the last."""
    for (earlier, few), (later, many) in pairwise(clock):
        if earlier <= time < later:
            return few + (many - few) * (time - earlier) / (later - earlier)
    return clock[0][1] if time < clock[0][0] else clock[-1][1]
