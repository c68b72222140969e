"""Replay a recorded run in one process, from its traces: the same islands, steps, entries, joins and failures.

Traces record when things happened: after how many steps an island contributed, absorbed an entry, or was replaced. All
contributions and entries are recomputed. If the replay ends with the same anchor, the exchange (threads, transport,
workers) followed the rules exactly. Works for runs of one row whose peers kept traces and entries
(`p2p-diloco join --keep-trace`).
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.app.models.evaluation import AnchorEvaluation
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.data import Corpus, Text
from p2p_diloco.app.text.run_text import open_own_stream, open_run_text
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.training_thread import StepRunner, Steps
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.settings import IDENTITY_FILE
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.island.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.round.round import rounding_seed
from p2p_diloco.protocol.wire.entry import Entry, included_places
from p2p_diloco.session.founding import genesis_states
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.span.reduce import reduce_parts
from research.recording import Recording, pace_of, read_recording
from research.setting import Circumstances, Setting, run_trial
from research.trace import chosen_spans

Heads = dict[SpanId, Digest]

JUDGED_TOKENS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        real_loss, replay_loss: held-out loss of the anchor at the end of the run and of the replay, nats per byte.
        gap: relative difference of the replay's loss.
        entries: entries of the run; `equal_entries` of them have exactly the bytes that the replay computed.
        islands: starts of peers, including restarts.
        tokens: tokens trained by all islands together.
    """

    real_loss: float
    replay_loss: float
    gap: float
    entries: int
    equal_entries: int
    islands: int
    tokens: int


def replay(folders: Sequence[Path], *, data: str | None, json: str | None, data_parallel: bool) -> int:
    """Replay a run, print how close the replay comes to it, and return the exit code, 0.

    Args:
        folders: state directories of the peers of one run.
        data: this machine's copy of the run's text.
        json: file for the figures, `-` for standard output.
        data_parallel: also train one machine on as many tokens, with the batch of all islands.
    Raises:
        ConfigError: no folder is given, one is not a state directory, or the text differs.
        StateError: the recording is incomplete.
    """
    check_target(json)
    if not folders:
        raise ConfigError("replay needs the state directories of the run's peers: replay <folder> <folder>")
    recording = read_recording(dict(_peer_of(folder) for folder in folders))
    if recording.plan.built_in is None:  # before its model is built, which could run code of its organiser
        raise ConfigError(
            f'"{recording.plan.manifest.name}" does not train the built-in model; replay only builds that'
        )
    corpus = open_run_text(recording.plan.manifest.data, data)
    result = Replay(recording, corpus).play(_progress(sys.stderr))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    pace = pace_of(recording)
    figures = dataclasses.asdict(result) | {"round_steps": pace.round_steps, "steps_late": pace.late}
    lines = [
        f"run {result.real_loss:.4f}, replay {result.replay_loss:.4f}: {100 * result.gap:+.3f} %",
        f"{result.equal_entries} of {result.entries} entries are equal, byte for byte; {result.islands} starts of "
        f"islands, {result.tokens:,} tokens",
        f"steps per round: {pace.round_steps:g}; steps from a contribution to its entry: median "
        f"{pace.late_at_most(0.5)}, 90th percentile {pace.late_at_most(0.9)}",
    ]
    if data_parallel:
        loss = _data_parallel_loss(recording, corpus, result.tokens)
        figures["data_parallel_loss"] = loss
        gap = 100 * (result.real_loss / loss - 1.0)
        lines.append(f"data-parallel, as many tokens: {loss:.4f}; the swarm {gap:+.2f} %")
    write_figures(json, figures)
    if json != STANDARD_OUTPUT:
        print("\n".join(lines))
    return 0


class Replay:
    """Replays a recording."""

    def __init__(self, recording: Recording, corpus: Text) -> None:
        self.recording = recording
        self.num_equal = 0
        self.failures: list[BaseException] = []
        self._corpus = corpus
        start = genesis_states(make_start(recording.plan), recording.founding)
        self._states = {(span, state.head.digest): state for span, state in start.items()}
        self._genesis = start
        self._sent: dict[tuple[PeerId, int, SpanId], bytes | memoryview] = {}
        self._kept: dict[tuple[PeerId, str], Mapping[str, Any]] = {}
        self._updates: dict[Digest, SpanUpdate] = {}
        self._lives = [_Life(self, peer, events) for peer, lives in recording.lives.items() for events in lives]

    def play(self, heard: Callable[[int, int], None] = lambda done, of: None) -> ReplayResult:
        """Replay the recording to its end.

        Args:
            heard: called with the number of replayed trace lines and their total.
        Raises:
            StateError: traces and entries are inconsistent.
        """
        torch.set_num_threads(1)
        total = sum(life.num_events for life in self._lives)
        before = -1
        while [life for life in self._lives if not life.go_on()]:  # advance all: each may unblock another
            for failure in self.failures:
                raise failure
            done = sum(life.done for life in self._lives)
            heard(done, total)
            if done == before:
                where = "; ".join(life.waits_for for life in self._lives)
                raise StateError(f"the traces and the stored entries are inconsistent: {where}")
            before = done
        for life in self._lives:
            life.island.state.close()
        return self._result()

    # -- for the lives

    def state_at(self, span: SpanId, head: Digest) -> SpanState | None:
        """Return a span at a chain digest, once the replay has reached it."""
        return self._states.get((span, head))

    def keep(self, peer: PeerId, label: str, inner: Mapping[str, Any]) -> None:
        """Store the optimiser state of a life, if a later life restores it."""
        lines = (line for life in self.recording.lives[peer] for line in life)
        if any(line.get("kept") == label for line in lines):
            self._kept[peer, label] = copy.deepcopy(dict(inner))

    def kept(self, peer: PeerId, label: str) -> Mapping[str, Any] | None:
        """Return the optimiser state stored by an earlier life of a peer, once it is there."""
        return self._kept.get((peer, label))

    def send(self, peer: PeerId, round_index: int, span: SpanId, payload: bytes | memoryview) -> None:
        """Store a contribution."""
        self._sent[peer, round_index, span] = payload

    def update(self, digest: Digest) -> SpanUpdate | None:
        """Return the replay's version of an entry, once all contributions in it have been made."""
        found = self._updates.get(digest)
        if found is None:
            entry = self.recording.entries.get(digest)
            payload = self._reduce(entry) if entry is not None else None
            if entry is None or payload is None:
                return None
            absorbed = entry.absorbed()
            found = SpanUpdate(span=entry.span, absorbed=absorbed, payload=payload, own_included=False)
            self._updates[digest] = found
            self.num_equal += payload == entry.payload
            self._extend(found, entry)
        return found

    def _extend(self, update: SpanUpdate, entry: Entry) -> None:
        before = self._states.get((entry.span, entry.parent))
        if before is not None:
            after = self._absorb(before, update)
            self._states[entry.span, after.head.digest] = after

    def _absorb(self, before: SpanState, update: SpanUpdate) -> SpanState:
        plan = self.recording.plan
        update_N = plan.codecs.entry.decode(update.payload, before.elements)
        return absorb(before, entry=update.absorbed, update_N=update_N, rule=plan.outer)

    def _reduce(self, entry: Entry) -> bytes | memoryview | None:
        roster, plan = self.recording.rosters[entry.roster], self.recording.plan
        peers = [roster.members[place].peer for place in included_places(entry)]
        payloads = [self._sent.get((peer, entry.round, entry.span)) for peer in peers]
        parts = tuple(
            Part(peer=peer, payload=payload, weight=weight, norm=0.0)
            for peer, payload, weight in zip(peers, payloads, entry.weights, strict=True)
            if payload is not None
        )
        if len(parts) < len(peers):
            return None
        action = ReduceSpan(
            round=entry.round,
            span=entry.span,
            stage=Stage.WHOLE,
            parts=parts,
            norm_limit=float("inf"),
            rounding_seed=rounding_seed(plan.rules.run, entry.round, entry.span),
            levels=plan.rules.has_strangers,
        )
        reduced = reduce_parts(action, plan.codecs, plan.rules.span_elements[entry.span], secret=None)
        if isinstance(reduced, str):
            raise StateError(f"the entry for {entry.span} of round {entry.round} cannot be recomputed: {reduced}")
        return reduced.payload

    # -- the end

    def _result(self) -> ReplayResult:
        plan = self.recording.plan
        real, replayed = dict(self._genesis), dict(self._genesis)
        for entry in sorted(self.recording.chain(self._genesis), key=lambda entry: entry.height):
            update = self._updates.get(entry.digest())
            if update is None:
                continue  # no peer with a trace absorbed it
            real_update = SpanUpdate(
                span=entry.span, absorbed=update.absorbed, payload=entry.payload, own_included=False
            )
            real[entry.span] = self._absorb(real[entry.span], real_update)
            replayed[entry.span] = self._absorb(replayed[entry.span], update)
        judge = AnchorEvaluation(plan.shape, plan.fragments, self._corpus, num_tokens=JUDGED_TOKENS)
        losses = [
            judge.loss([_joined(states, spans) for spans in map(plan.spans_of, range(len(plan.fragments)))])
            for states in (real, replayed)
        ]
        return ReplayResult(
            real_loss=losses[0],
            replay_loss=losses[1],
            gap=losses[1] / losses[0] - 1.0,
            entries=len(self._updates),
            equal_entries=self.num_equal,
            islands=len(self._lives),
            tokens=sum(life.island.state.counts.tokens for life in self._lives),
        )

    def island_of(self, peer: PeerId, position: int) -> StepRunner:
        """Return a new island of a peer."""
        plan = self.recording.plan
        stream = open_own_stream(self._corpus, plan, peer, position)
        model = build_model(plan.shape, plan.manifest.model.seed)
        loop = InnerLoop(model, stream, plan.inner, torch.device("cpu"))
        lay_end_to_end(model, plan.fragments)
        local = LocalSpans(plan, LocalParameters(model, plan.fragments))

        def damaged(span: SpanId, reason: str) -> None:
            self.failures.append(StateError(f"{span} cannot apply an entry of the recording: {reason}"))

        host = StateHost(
            plan=plan, now=lambda: 0.0, in_loop=lambda call: call(), died=self.failures.append, damaged=damaged
        )
        return StepRunner(Steps(loop), TrainedState(host, local))


class _Life:
    """One start of one peer."""

    def __init__(self, replay: Replay, peer: PeerId, events: Sequence[dict[str, Any]]) -> None:
        self.done = 1
        self.num_events = len(events)
        self._replay = replay
        self._peer = peer
        self._events = events
        self.island = replay.island_of(peer, events[0]["position"])
        self._state = self.island.state

    @property
    def waits_for(self) -> str:
        """The trace line that it is waiting at, for people."""
        name = short_peer_id(self._peer)
        return f"{name} waits at line {self.done + 1}" if self.done < self.num_events else f"{name} is done"

    def go_on(self) -> bool:
        """Replay as many lines as possible; return whether all are done."""
        while self.done < self.num_events and self._do(self._events[self.done]):
            self.done += 1
        return self.done == self.num_events

    def _do(self, line: dict[str, Any]) -> bool:
        match line["what"]:
            case "loaded":
                heads = {SpanId(f, i): Digest(bytes.fromhex(head)) for f, i, head in line["heads"]}
                return self._go_on_from(line.get("kept")) and self._load(heads)
            case "batch":
                self._step_to(line["steps"])
                self.island.use_batch(line["windows"])
                return True
            case "kept":
                self._step_to(line["steps"])
                self._replay.keep(self._peer, line["label"], self.island.loop.state_dict())
                return True
            case "contributed":
                self._step_to(line["steps"])
                contribution = self._state.contribute(line["round"], line["fragment"], chosen_spans(line))
                for span in contribution.spans if contribution is not None else ():
                    self._replay.send(self._peer, line["round"], span.span, span.payload)
                return True
            case "absorbed":
                return self._absorb(line)
            case "took":
                return self._take(line)
            case other:
                raise StateError(f"a trace of {short_peer_id(self._peer)} has the unknown record {other!r}")

    def _go_on_from(self, label: str | None) -> bool:
        kept = self._replay.kept(self._peer, label) if label is not None else None
        if kept is not None:
            self.island.loop.load_state_dict(kept)
        return label is None or kept is not None

    def _load(self, heads: Heads) -> bool:
        states = {span: self._replay.state_at(span, head) for span, head in heads.items()}
        found = {span: state for span, state in states.items() if state is not None}
        if len(found) < len(states):
            return False
        for span, state in found.items():
            self._state.replace(span, state)
        self._state.wait_until_idle()
        return self._state.begin()

    def _absorb(self, line: dict[str, Any]) -> bool:
        update = self._replay.update(Digest(bytes.fromhex(line["entry"])))
        if update is None:
            return False
        self._step_to(line["steps"])
        self._state.apply(update)
        self._state.wait_until_idle()
        return True

    def _take(self, line: dict[str, Any]) -> bool:
        span = SpanId(*line["span"])
        state = self._replay.state_at(span, Digest(bytes.fromhex(line["head"])))
        if state is None:
            return False
        self._step_to(line["steps"])
        self._state.replace(span, state)
        self._state.wait_until_idle()
        return True

    def _step_to(self, steps: int) -> None:
        while self._state.counts.steps < steps:
            self._state.border()
            self.island.step()


def _joined(states: dict[SpanId, SpanState], spans: Sequence[SpanId]) -> Vector:
    return np.concatenate([states[span].anchor_N for span in spans])


def _peer_of(folder: Path) -> tuple[PeerId, Path]:
    identity = folder / IDENTITY_FILE
    if not identity.is_file():
        raise ConfigError(f"{folder} is not a peer's state directory: it has no {IDENTITY_FILE}")
    return read_key_file(identity).peer, folder


def _progress(stream: TextIO) -> Callable[[int, int], None]:
    def heard(done: int, of: int) -> None:
        if stream.isatty():
            print(f"\r\033[K{done} of {of} trace lines", end="", file=stream, flush=True)

    return heard


def _data_parallel_loss(recording: Recording, corpus: Text, tokens: int) -> float:
    """Return the held-out loss of one machine after as many tokens as the run, with the run's inner optimiser."""
    plan, islands = recording.plan, len(recording.lives)
    setting = Setting(
        name="data-parallel",
        system="data-parallel",
        islands=islands,
        ticks=tokens // (islands * plan.inner.batch * plan.shape.context),
        batch=plan.inner.batch,
    )
    assert isinstance(corpus, Corpus), "replayed runs train the built-in model on bytes"
    within = Circumstances(shape=plan.shape, rule=plan.inner, corpus=corpus)
    return run_trial(setting, 0, within=within).loss
