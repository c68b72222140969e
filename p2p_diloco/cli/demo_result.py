"""The result of a demo: figures from the peers' status files and events, and the checks that failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_diloco.cli.demo_plan import BOOTSTRAP, FRAGMENTS, LONE, DemoPlan
from p2p_diloco.cli.demo_swarm import DemoStory
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """One peer's last status, its events, and the start time of its process (Unix seconds)."""

    status: PeerStatus | None
    events: tuple[PeerEvent, ...]
    started: float

    def evaluations(self) -> tuple[PeerEvent, ...]:
        """Return the measurements of held-out loss, oldest first."""
        return tuple(event for event in self.events if event.topic == "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLosses:
    """Held-out loss before training (of the initial model) and bigram entropy, in nats per byte."""

    start: float
    bigram: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The figures of `--json`.

    Attributes:
        heads_equal: whether the SHA-256 over the final φ and m is the same on all living peers.
        head: that SHA-256; None unless equal.
        rounds: rounds closed while the longest-ready living peer was ready.
        cycles: the same in cycles.
        grid_rows: rows of the averaging grid at the end.
        peers_final: peers that reached the last round and finished.
        participation: share of the contributions of live, ready members that were included.
        loss_first: held-out loss of the anchor at the start, nats per byte.
        loss_last: held-out loss of the anchor at the end.
        lone_loss: loss of an island trained alone, with the same share of the machine; None unless requested.
        baseline_loss: bigram entropy of the held-out text.
        bytes_sent_per_parameter_per_cycle: vectors and their headers, per living peer.
        control_bytes_per_second: control traffic sent per living peer.
        transfer_bytes: state sent to peers that caught up, by all living peers.
        inner_steps: steps of all volunteers, including the killed one up to its last status.
        tokens: tokens of these steps.
        killed: names of volunteers killed.
        joined_late: names of volunteers that joined late.
        joined_late_ready_seconds: time from the start of the late peer's process until it was ready.
        bootstrap_killed: whether the bootstrap was killed.
        seconds: duration of training.
        sample: text that a finished peer's model generates after a fixed prompt; None if no peer finished.
        failures: the checks that failed; empty if all passed.
    """

    heads_equal: bool
    head: str | None
    rounds: int
    cycles: float
    grid_rows: int
    peers_final: int
    participation: float | None
    loss_first: float
    loss_last: float | None
    lone_loss: float | None
    baseline_loss: float
    bytes_sent_per_parameter_per_cycle: float | None
    control_bytes_per_second: float | None
    transfer_bytes: int
    inner_steps: int
    tokens: int
    killed: tuple[str, ...]
    joined_late: tuple[str, ...]
    joined_late_ready_seconds: float | None
    bootstrap_killed: bool
    seconds: float
    sample: str | None
    failures: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }


def judge_demo(
    plan: DemoPlan, story: DemoStory, traces: Mapping[str, Traces], text: TextLosses, sample: str | None = None
) -> DemoResult:
    """Compute the figures and list the checks that failed.

    Args:
        plan: the demo's timeline.
        story: what happened.
        traces: traces of every started process, by name.
        text: losses before training.
        sample: text that the final model generates.
    """
    volunteers = {name: traces[name] for name in plan.peers if name in traces}
    survivors = {name: trace for name, trace in volunteers.items() if name not in story.killed}
    final = [trace.status for trace in survivors.values() if trace.status is not None]
    finishers = [trace for trace in survivors.values() if has_finished(trace.status)]
    finished = [trace.status for trace in finishers if trace.status is not None]
    digests = {status.state_digest for status in finished}
    equal = len(digests) == 1 and len(finished) == len(survivors)
    longest = max(final, key=lambda status: status.rounds_closed, default=None)
    late = volunteers.get(plan.late)
    everyone = [trace.status for trace in volunteers.values() if trace.status is not None]
    figures: dict[str, Any] = {
        "heads_equal": equal,
        "head": digests.pop() if equal else None,
        "rounds": longest.rounds_closed if longest else 0,
        "cycles": longest.rounds_closed / FRAGMENTS if longest else 0.0,
        "grid_rows": max((len(status.grid) for status in final), default=0),
        "peers_final": len(finished),
        "participation": longest.participation if longest else None,
        "loss_first": text.start,
        "loss_last": _last_loss(finishers),
        "lone_loss": _lone_loss(traces.get(LONE)),
        "baseline_loss": text.bigram,
        "bytes_sent_per_parameter_per_cycle": _vector_rate(final),
        "control_bytes_per_second": _control_rate(survivors.values()),
        "transfer_bytes": sum(status.bytes_sent.transfer for status in final),
        "inner_steps": sum(status.inner_steps for status in everyone),
        "tokens": sum(status.tokens for status in everyone),
        "killed": tuple(name for name in story.killed if name != BOOTSTRAP),
        "joined_late": (plan.late,) if late is not None else (),
        "joined_late_ready_seconds": _ready_seconds(late) if late is not None else None,
        "bootstrap_killed": BOOTSTRAP in story.killed,
        "seconds": plan.end_at,
        "sample": sample,
    }
    unfinished = [name for name, trace in survivors.items() if not has_finished(trace.status)]
    return DemoResult(**figures, failures=tuple(_failures(plan, story, figures, unfinished)))


def _failures(plan: DemoPlan, story: DemoStory, figures: Mapping[str, Any], unfinished: list[str]) -> Iterable[str]:
    for name in unfinished:
        yield f"{name} did not finish"
    if not unfinished and not figures["heads_equal"]:
        yield "the peers ended with different bytes"
    loss, baseline = figures["loss_last"], figures["baseline_loss"]
    if loss is None:
        yield "no peer measured the anchor's loss at the end"
    elif loss >= baseline:
        yield f"the loss of the anchor is {loss:.3f}; expected less than the bigram entropy, {baseline:.3f}"
    if plan.victim not in story.killed:
        yield f"{plan.victim} was not killed; it exited earlier"
    if not figures["bootstrap_killed"]:
        yield "the bootstrap was not killed; it exited earlier"
    if figures["joined_late_ready_seconds"] is None:
        yield f"{plan.late} joined late and was never ready"
    for name, code in story.exit_codes.items():
        if code != 0:
            yield f"{name} exited with code {code}"


def has_finished(status: PeerStatus | None) -> bool:
    """Return whether a peer reached the last round and published its final state digest."""
    return status is not None and status.phase == "finished" and status.state_digest != ""


def _last_loss(traces: Iterable[Traces]) -> float | None:
    """Return the anchor's loss at the end; the highest if peers differ."""
    lasts = [trace.evaluations()[-1] for trace in traces if trace.evaluations()]
    losses = [loss for event in lasts if (loss := _figure(event, "anchor_loss")) is not None]
    return max(losses, default=None)


def _lone_loss(trace: Traces | None) -> float | None:
    return _figure(trace.evaluations()[-1], "local_loss") if trace is not None and trace.evaluations() else None


def _vector_rate(statuses: Iterable[PeerStatus]) -> float | None:
    sent, carried = 0.0, 0.0
    for status in statuses:
        sent += status.bytes_sent.vectors
        carried += status.parameters * status.vector_cycles
    return sent / carried if carried else None


def _control_rate(traces: Iterable[Traces]) -> float | None:
    sent, seconds = 0.0, 0.0
    for trace in traces:
        if trace.status is not None:
            sent += trace.status.bytes_sent.control
            seconds += max(trace.status.updated - trace.started, 0.0)
    return sent / seconds if seconds else None


def _ready_seconds(trace: Traces) -> float | None:
    ready = [event.time for event in trace.events if event.topic == "ready"]
    return max(ready[0] - trace.started, 0.0) if ready else None


def _figure(event: PeerEvent, name: str) -> float | None:
    value = event.figures.get(name)
    return float(value) if isinstance(value, int | float) else None
