"""A run small enough for tests, and an island whose training thread is the test itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.data import BatchStream, Corpus, open_corpus
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.training_thread import StepRunner, Steps
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.island.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.session.founding import start_from
from p2p_diloco.session.held_state import HeldState, StateHost
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.signing import SigningKey
from p2p_diloco.span_log import AbsorbedEntry
from p2p_diloco.storage.trace import Trace

ORGANISER = SigningKey(b"o" * 32)
CLOCK_START = 1_000_000.0
ROSTER = sha256(b"a roster")
SMALL: dict[str, Any] = {
    "model": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 24, "context": 12},
    "rounds": {"clock_start": CLOCK_START, "round_seconds": 8.0, "fragments": 2, "spans_per_fragment": 4},
    "inner": {"step_tokens": 24, "warmup_steps": 1},
}


def small_manifest(values: Mapping[str, Any] | None = None) -> RunManifest:
    """Return the manifest of a model of a few thousand parameters; `values` overrides it by dotted key."""
    merged = {f"{section}.{key}": value for section, keys in SMALL.items() for key, value in keys.items()}
    merged |= values or {}
    return draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="small", values=merged)


def as_format_3(encoded: bytes) -> bytes:
    """Return a signed manifest as the version before wrote it: another format number, and keys that are gone."""
    return encoded.replace(b'"format":5,', b'"format":3,').replace(b'"membership":', b'"limits":{},"membership":')


def small_plan(values: Mapping[str, Any] | None = None) -> RunPlan:
    return plan_run(small_manifest(values))


def write_text(folder: Path) -> Path:
    """Write 40 kB of a small language, the same in every run."""
    words = ["anchor", "island", "round", "roster", "entry", "void", "span", "\n"]
    generator = random.Random(5)
    path = folder / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(7_000)))
    return path


def small_corpus(folder: Path) -> Corpus:
    return open_corpus(write_text(folder))


def peer_key(name: str) -> SigningKey:
    return SigningKey(sha256(b"key of", name.encode()))


def start_states(plan: RunPlan, model: nn.Module | None = None) -> dict[SpanId, SpanState]:
    start = make_start(plan) if model is None else start_from(plan, LocalParameters(model, plan.fragments))
    return {span: genesis_state(anchor_N, ROSTER) for span, anchor_N in start.items()}


class EveryThird:
    """A stand-in for the choice of a batch, which changes it after every third step."""

    def __init__(self, sizes: Sequence[int], *, planned: int, planned_steps: int, cycle_seconds: float) -> None:
        self.sizes, self.size, self.planned_steps, self.cycle_steps = sizes, planned, planned_steps, 20.0
        self._steps = 0

    def stepped(self, size: float, seconds: float) -> int:
        self._steps += 1
        self.size = self.sizes[self._steps // 3 % len(self.sizes)]
        return self.size


OPEN: list[HeldState] = []
"""States made in a test; their threads are closed after it."""


class HandDrivenIsland:
    """A model and its state whose training thread is the test: it steps and reaches boundaries on request."""

    def __init__(
        self,
        plan: RunPlan,
        corpus: Corpus,
        *,
        name: str = "ada",
        trace: Trace | None = None,
        kind: type[LocalSpans] = LocalSpans,
        contributes_between: bool = False,
        in_loop: Callable[[Callable[[], None]], None] = lambda call: call(),
        report: Callable[[str, str], None] = lambda topic, text: None,
    ) -> None:
        self.plan = plan
        self.now = plan.rules.clock.begin(0)
        self.failures: list[BaseException] = []
        self.damaged: list[tuple[SpanId, str]] = []
        model = build_model(plan.shape, plan.manifest.model.seed)
        self.loop = InnerLoop(model, stream_of(plan, corpus, peer_key(name).peer), plan.inner, torch.device("cpu"))
        lay_end_to_end(model, plan.fragments)
        self.parameters = LocalParameters(model, plan.fragments)
        host = StateHost(
            plan=plan,
            now=lambda: self.now,
            in_loop=in_loop,
            died=self.failures.append,
            damaged=lambda span, reason: self.damaged.append((span, reason)),
            report=report,
        )
        self.state = TrainedState(
            host,
            kind(plan, self.parameters),
            trace=trace,
            call_before_update=self.loop.call_before_update if contributes_between else None,
        )
        self._steps = StepRunner(Steps(self.loop), self.state)
        OPEN.append(self.state)

    def hold(self, states: Mapping[SpanId, SpanState]) -> None:
        for span, state in states.items():
            self.state.replace(span, state)
        self.settle()

    def settle(self) -> None:
        """Follow the updates that were handed over, then reach a boundary."""
        self.state.wait_until_idle()
        self.state.border()

    def step(self, num_steps: int = 1) -> None:
        """Train."""
        for _ in range(num_steps):
            assert self.state.begin(), "not all spans are held"
            self._steps.step()

    def contribute(self, round_index: int, fragment: int = 0, deadline: float = float("inf")) -> Any:
        """Return the answer to a snapshot."""
        answers: list[FragmentContribution | None] = []
        self.state.request_contribution(round_index, fragment, deadline, answers.append)
        self.settle()
        assert len(answers) == 1, "a snapshot is answered exactly once"
        return answers[0]

    def local(self, span: SpanId) -> Vector:
        place = self.plan.places[span]
        return self.parameters.read(span.fragment, place.start, place.stop)

    def residual(self, span: SpanId) -> Vector:
        """Return φ − θ − Σ in flight."""
        state = self.state.span_state(span)
        assert state is not None
        rest_N = state.anchor_N - self.local(span)
        for vector_N in self.in_flight(span):
            rest_N = rest_N - vector_N
        return rest_N

    def in_flight(self, span: SpanId) -> tuple[Vector, ...]:
        return self.state.in_flight(span).vectors


def stream_of(plan: RunPlan, corpus: Corpus, peer: PeerId) -> BatchStream:
    return BatchStream(corpus, plan.rules.run, peer, batch=plan.inner.batch, context=plan.shape.context)


def update_of(
    span: SpanId, round_index: int, payload: bytes, *, radius: float = 1e6, own_included: bool = True
) -> SpanUpdate:
    """Return an entry that carries `payload`, as the node hands it over."""
    digest = sha256(b"entry", bytes([span.fragment, span.index]), round_index.to_bytes(8, "little"), payload)
    absorbed = AbsorbedEntry(digest=digest, round=round_index, roster=ROSTER, radius=radius, median_weight=1.0)
    return SpanUpdate(span=span, absorbed=absorbed, payload=payload, own_included=own_included)


def entry_payload(plan: RunPlan, vector_N: Vector) -> bytes:
    return plan.codecs.entry.encode(np.ascontiguousarray(vector_N, dtype=np.float32))
