"""A run small enough for tests, and an island whose thread is the test itself."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.island.data import BatchStream, Corpus, open_corpus
from p2p_diloco.island.model import build_model
from p2p_diloco.manifest import RunManifest
from p2p_diloco.outer.state import AbsorbedEntry, SpanState, genesis_state
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.round import FragmentContribution
from p2p_diloco.run_file import draft_manifest
from p2p_diloco.signing import SigningKey
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.founding import make_start
from p2p_diloco.trainer.island import Island
from p2p_diloco.trainer.island_thread import IslandThread
from p2p_diloco.trainer.run_plan import RunPlan, plan_run

ORGANISER = SigningKey(b"o" * 32)
CLOCK_START = 1_000_000.0
ROSTER = sha256(b"a roster")
SMALL: dict[str, Any] = {
    "model": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 24, "context": 12},
    "rounds": {"clock_start": CLOCK_START, "round_seconds": 8.0, "fragments": 2, "spans_per_fragment": 4},
    "inner": {"batch": 2, "warmup_steps": 1},
}


def small_manifest(values: Mapping[str, Any] | None = None) -> RunManifest:
    """Return the manifest of a model of a few thousand parameters; `values` by dotted key on top."""
    merged = {f"{section}.{key}": value for section, keys in SMALL.items() for key, value in keys.items()}
    merged |= values or {}
    return draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="small", values=merged)


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


def start_states(plan: RunPlan) -> dict[SpanId, SpanState]:
    return {span: genesis_state(anchor_N, ROSTER) for span, anchor_N in make_start(plan).items()}


class HandDrivenIsland:
    """An island thread that is never started: the test does its steps, one at a time."""

    def __init__(self, plan: RunPlan, corpus: Corpus, *, name: str = "ada") -> None:
        self.plan = plan
        self.now = plan.rules.clock.begin(0)
        self.failures: list[BaseException] = []
        island = Island(
            plan=plan,
            model=build_model(plan.shape, plan.manifest.model.seed),
            stream=stream_of(plan, corpus, peer_key(name).peer),
            device=torch.device("cpu"),
        )
        self.thread = IslandThread(
            island=island, now=lambda: self.now, in_loop=lambda call: call(), died=self.failures.append
        )

    def hold(self, states: Mapping[SpanId, SpanState]) -> None:
        for span, state in states.items():
            self.thread.replace(span, state)
        self.settle()

    def settle(self) -> None:
        """Do what was handed over, as at a step border."""
        while self.thread._commands:
            self.thread._do(self.thread._commands.popleft())

    def step(self, num_steps: int) -> None:
        """Train."""
        for _ in range(num_steps):
            assert self.thread.island.load(), "not all spans are held"
            self.thread._note(self.thread.island.step(), 1.0)

    def contribute(self, round_index: int, fragment: int = 0, deadline: float = float("inf")) -> Any:
        """Return the answer to a snapshot."""
        answers: list[FragmentContribution | None] = []
        self.thread.take_snapshot(round_index, fragment, deadline, answers.append)
        self.settle()
        assert len(answers) == 1, "a snapshot is answered exactly once"
        return answers[0]

    def local(self, span: SpanId) -> Vector:
        place = self.plan.places[span]
        return self.thread.island.parameters.read(span.fragment, place.start, place.stop)

    def residual(self, span: SpanId) -> Vector:
        """Return φ − θ − Σ in flight."""
        state = self.thread.span_state(span)
        assert state is not None
        rest_N = state.anchor_N - self.local(span)
        for vector_N in self.in_flight(span):
            rest_N = rest_N - vector_N
        return rest_N

    def in_flight(self, span: SpanId) -> tuple[Vector, ...]:
        held = self.thread.island._in_flight.get(span)
        return tuple(held.vectors) if held is not None else ()


def stream_of(plan: RunPlan, corpus: Corpus, peer: PeerId) -> BatchStream:
    return BatchStream(corpus, plan.rules.run, peer, batch=plan.inner.batch, context=plan.shape.context)


def update_of(
    span: SpanId, round_index: int, payload: bytes, *, radius: float = 1e6, own_included: bool = True
) -> SpanUpdate:
    """Return an entry that carries `payload`, as the swarm hands it over."""
    digest = sha256(b"entry", bytes([span.fragment, span.index]), round_index.to_bytes(8, "little"), payload)
    absorbed = AbsorbedEntry(digest=digest, round=round_index, roster=ROSTER, radius=radius, median_weight=1.0)
    return SpanUpdate(span=span, absorbed=absorbed, payload=payload, own_included=own_included)


def entry_payload(plan: RunPlan, vector_N: Vector) -> bytes:
    return plan.codecs.entry.encode(np.ascontiguousarray(vector_N, dtype=np.float32))


RUN_OF_NOBODY = Digest(bytes(32))
