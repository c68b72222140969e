"""The built-in training: trains the model of the manifest on the run's text, in its own thread."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from p2p_diloco.app.models.evaluation import HeldOutWatch, evaluation_of
from p2p_diloco.app.models.run_model import build_run_model
from p2p_diloco.app.models.text_model import TextModel
from p2p_diloco.app.text.data import Batches, BatchStream, Text
from p2p_diloco.app.text.mapped_files import list_byte_files
from p2p_diloco.app.text.run_text import (
    ArrivingText,
    first_position,
    keep_tokenizer,
    open_fetched_text,
    open_own_stream,
    open_run_text,
    open_stream,
)
from p2p_diloco.app.training.inner_loop import InnerLoop, choose_device
from p2p_diloco.app.training.memory_needs import Room, check_memory, explain_tight, room_here
from p2p_diloco.app.training.precision import choose_precision
from p2p_diloco.app.training.rank_steps import RankBatches, RankSteps, needs_shards
from p2p_diloco.app.training.training_thread import MANY_NOT_APPLIED, StepRunner, Steps, TrainingThread
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, P2PDilocoError
from p2p_diloco.island.batch_size import BatchChoice, batch_sizes
from p2p_diloco.island.inner_state import InnerState
from p2p_diloco.island.island import THE_END, TURN, Island, RankInner, plan_text
from p2p_diloco.island.local_spans import LocalSpans, describe_device, spans_for
from p2p_diloco.island.parameters import Buffers, LocalParameters, lay_end_to_end, trained
from p2p_diloco.island.rank_parameters import RankParameters
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.session.training import HeldOutLoss, Training, TrainingHost
from p2p_diloco.storage.trace import Trace

KEPT = "the optimiser"
"""Name of the training's private state, as people see it."""
LAST_STEP_SECONDS = 5.0  # a step on a slow machine may take longer; then do not wait for it


class BuiltInTraining(Training):
    """Trains the model of a manifest on the run's text.

    Args:
        evaluate_seconds: seconds between measurements of the held-out loss; 0: never.
        founds: whether this peer founds the run, so that it needs the initial values of the model.
        island: the ranks that train together, of which this is rank 0; None: only this process.
    """

    owns_process = True
    reads_text = True
    checks_memory = True

    def __init__(self, *, evaluate_seconds: float = 30.0, founds: bool = False, island: Island | None = None) -> None:
        super().__init__()
        self.evaluate_seconds = evaluate_seconds
        self._founds = founds
        self._island = island
        self._ranks: RankSteps | None = None
        self._built: TextModel | None = None
        self._thread: TrainingThread | None = None
        self._steps: StepRunner | None = None
        self._watch: HeldOutWatch | None = None
        self._make_watch: Callable[[Text], HeldOutWatch] | None = None
        self._arriving: ArrivingText | None = None
        self._tight: str | None = None

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Refuse a missing device or text, and a run whose model does not fit or cannot be built here."""
        choose_device(settings.device)
        if settings.keep_trace and self._island is not None:
            raise ConfigError(
                "a replay makes each step in one process, which rounds otherwise than several ranks; leave out "
                "--keep-trace, or train with --ranks 1"
            )
        if manifest is not None:
            plan = plan_run(manifest)
            if manifest.model.is_own_loop:
                raise ConfigError(plan.why_no_model())
            if self._thread is None:  # what an earlier session has freed may still belong to this process
                self._check_memory(plan, settings)
            if settings.data is not None or not manifest.data.share:  # otherwise it is fetched from other peers
                open_run_text(manifest.data, settings.data)
            if manifest.model.kind != "built-in":  # whether it can be built shows only when it is
                self._built = build_run_model(plan, settings.model, founds=self._founds)
        elif settings.data is not None:
            list_byte_files(settings.data)

    def _check_memory(self, plan: RunPlan, settings: PeerSettings) -> None:
        """Refuse a run that cannot fit into memory; remember a warning if it is likely not to."""
        room, windows = self._room(plan, settings), 1  # an accelerator tries how many fit
        check_memory(plan, room)
        if room.device_free is None:
            whole = -(-plan.inner.batch // room.ranks)
            windows = min(settings.windows_at_once or whole, whole)
        self._tight = explain_tight(plan, room, windows)

    def _room(self, plan: RunPlan, settings: PeerSettings) -> Room:
        device = choose_device(settings.device)
        if self._island is None:
            return room_here(device)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return room_here(
            device, ranks=self._island.ranks.count, here=here, has_shards=_has_shards(plan, settings, device)
        )

    def open(self, host: TrainingHost) -> TrainedState:
        plan, settings = host.plan, host.settings
        if self._tight is not None:
            host.report_soon("memory", self._tight)
        # The first optimiser of a process imports torch._dynamo, which takes seconds.
        text = "starting to train; PyTorch takes a few seconds to load its optimisers"
        host.report_soon("starting", text)
        corpus = open_run_text(plan.manifest.data, settings.data) if host.text is None else None
        if corpus is not None:
            keep_tokenizer(host.folder, corpus)
            stream: BatchStream | ArrivingText = open_stream(corpus, plan, host.peer, host.incarnation)
        else:
            stream = self._arriving = self._await_text(host)
        model, self._built = self._built or build_run_model(plan, settings.model, founds=self._founds), None
        Buffers(model.module).begin_with(self._continued_buffers)
        # Wrappers of several ranks change the model, so a copy without values is evaluated.
        evaluated = model if self._island is None else model.skeleton()
        self._make_watch = lambda text: HeldOutWatch(plan, evaluation_of(plan, evaluated, text, model.module))
        built = self._build(host, model, stream)
        loop, parameters = built.loop, self._parameters_of(plan, model)
        trace = Trace(host.folder) if settings.keep_trace else None
        if trace is not None:
            trace.began(stream.position)
        local = spans_for(plan, parameters, loop.device)
        host.report_soon("device", self._describe(plan, local, loop))
        self.state = TrainedState(
            host,
            local,
            trace=trace,
            inner=self._inner_of(plan, host.folder, loop),
            call_before_update=loop.call_before_update if self._island is None and loop.device.type == "cpu" else None,
        )
        self._steps = self._runner_of(host, built, self.state)
        self._thread = TrainingThread(
            state=self.state,
            step=self._steps.step,
            pace=self.pace,
            can_step=self._has_text,
            island=self._island,
            windows=lambda: loop.stream.batch,
        )
        if self._island is not None:
            self._thread.start()  # the other ranks wait for its turns
        if self.evaluate_seconds > 0 and corpus is not None:
            self._watch = self._make_watch(corpus)
        return self.state

    def _build(self, host: TrainingHost, model: TextModel, stream: Batches) -> Steps:
        plan, settings, report_memory = host.plan, host.settings, partial(host.report_soon, "memory")
        if self._island is None:
            return build_steps(plan, settings, model, stream, report=report_memory)
        ranks = self._island.ranks
        has_shards = _has_shards(plan, settings, choose_device(settings.device))
        # Refused here before the other ranks are asked, if the ranks cannot share the batch.
        own = RankBatches(ranks, stream, batch=plan.inner.batch, context=plan.context)
        together = RankSteps(ranks, has_shards=has_shards, uses_all=plan.built_in is not None)
        together.check_batch(plan.inner.batch)
        order = RankOrder(manifest=plan.manifest.model_dump_json(), founds=self._founds, has_shards=has_shards)
        self._island.order_training(order.to_json())
        self._ranks = together
        return self._island.build(lambda: build_steps(plan, settings, model, own, ranks=together, report=report_memory))

    def _runner_of(self, host: TrainingHost, built: Steps, state: TrainedState) -> StepRunner:
        """Return what makes the steps; it chooses their windows if the run plans steps and the settings allow it."""
        planned, planned_steps = host.plan.inner.batch, host.plan.manifest.rounds.planned_steps
        choice = None
        if planned_steps is not None and host.settings.batch == "auto":
            ranks, has_shards = (1, False) if self._ranks is None else (self._ranks.count, self._ranks.has_shards)
            choice = BatchChoice(
                batch_sizes(planned, ranks=ranks, has_shards=has_shards),
                planned=planned,
                planned_steps=planned_steps,
                cycle_seconds=host.plan.rules.cycle_seconds,
            )

        def note_windows(windows: int) -> None:
            sizes = (planned,) if choice is None else choice.sizes
            facts = {"planned_windows": planned, "fewest_windows": sizes[0], "most_windows": sizes[-1]}
            host.in_loop(lambda: host.reporter.note(step_windows=windows, **facts))

        note_windows(planned)
        return StepRunner(built, state, choice=choice, changed=note_windows)

    def _parameters_of(self, plan: RunPlan, model: TextModel) -> LocalParameters:
        if self._island is None:
            return LocalParameters(model.module, plan.fragments)
        return RankParameters(model.module, trained(model.module), plan.fragments, self._island.ranks)

    def _inner_of(self, plan: RunPlan, folder: Path, loop: InnerLoop) -> InnerState:
        kept = {KEPT: loop}
        if self._island is None:
            return InnerState(folder, kept)
        self._island.ranks.announce(plan_text(plan.fragments, folder.name))
        return RankInner(self._island.ranks, folder, kept)

    def _describe(self, plan: RunPlan, local: LocalSpans, loop: InnerLoop) -> str:
        precision = loop.precision
        products = "" if plan.inner.precision == "float32" == precision.name else f"; {precision}"
        ranks = "" if self._ranks is None else f"; {self._ranks}"
        activations = "; activations are recomputed" if loop.recomputes else ""
        return f"{describe_device(loop.device, local)}{products}{activations}{ranks}"

    def _await_text(self, host: TrainingHost) -> ArrivingText:
        assert host.text is not None, "there is no other text"
        plan = host.plan
        return ArrivingText(
            host.text,
            open_whole=partial(open_fetched_text, plan.manifest.data, host.text.root),
            stream_of=lambda text, position: open_own_stream(text, plan, host.peer, position),
            opened=partial(keep_tokenizer, host.folder),
            batch=plan.inner.batch,
            context=plan.context,
            position=first_position(host.incarnation),
            is_tokens=plan.manifest.data.tokenizer is not None,
            needs_all=host.settings.keep_trace,  # a replay draws the same windows from the whole text
            peer=host.peer,
        )

    def _has_text(self) -> bool:
        return self._arriving is None or self._arriving.is_ready()

    def is_stepping(self) -> bool:
        """Return whether steps are being made; False before a shared text is here, or while no step can be applied."""
        has_text = self._arriving is None or self._arriving.has_begun
        return has_text and (self._steps is None or self._steps.num_not_applied < MANY_NOT_APPLIED)

    def start(self) -> None:
        if self._island is None:  # otherwise it has started with the other ranks
            self._opened().start()

    def stop_stepping(self) -> None:
        self._opened().stop_training()

    def wait_until_idle(self) -> None:
        self._opened().wait_until_idle()

    async def measure(self) -> HeldOutLoss | None:
        """Measure both losses on the held-out text, once all of it is here."""
        is_due = self._watch is None and self.evaluate_seconds > 0
        if is_due and self._arriving is not None and self._arriving.has_held_out():
            assert self._make_watch is not None, "set with the text"
            # A text of its own: only the training thread may read the stream's.
            text = await asyncio.to_thread(self._arriving.open_whole)
            self._watch = await asyncio.to_thread(self._make_watch, text)
        if self._watch is None or self.state is None:
            return None
        return await self._watch.measure(self.state)

    async def end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = self._arriving = None  # a later session opens its own
        if self._thread is not None:
            self._thread.stop()
            # A thread that is inside torch when the interpreter exits aborts the process.
            await asyncio.to_thread(self._thread.join, LAST_STEP_SECONDS)

    def _opened(self) -> TrainingThread:
        assert self._thread is not None, "open it first"
        return self._thread


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """An order of rank 0 to the other ranks of its island to build the same model.

    Attributes:
        manifest: the run's manifest as JSON, which rank 0 has verified.
        founds: whether this peer founds the run.
        has_shards: whether each rank holds a shard of the model, instead of a copy.
    """

    manifest: str
    founds: bool
    has_shards: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def build_steps(
    plan: RunPlan,
    settings: PeerSettings,
    model: TextModel,
    stream: Batches,
    *,
    ranks: RankSteps | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Steps:
    """Put a model on this process's device and return the steps that train it.

    Args:
        ranks: the ranks that train together, all of which call this; None: only this process.
        report: called with a sentence about the memory of the device.
    """
    device = choose_device(settings.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None
    precision = choose_precision(plan.inner.precision, settings.precision, device, capability)
    loop = InnerLoop(
        model,
        stream,
        plan.inner,
        device,
        precision=precision,
        recompute=settings.recompute,
        report=report,
        ranks=ranks,
    )
    if ranks is None or not ranks.has_shards:
        lay_end_to_end(model.module, plan.fragments)
    return Steps(loop, windows_at_once=settings.windows_at_once, report=report, ranks=ranks)


def _has_shards(plan: RunPlan, settings: PeerSettings, device: torch.device) -> bool:
    is_large = settings.shards == "auto" and needs_shards(plan.num_parameters, device)
    return settings.shards == "always" or is_large


class KnownError(P2PDilocoError):
    """An error that rank 0 knows and reports."""


def follow_rank_0(island: Island, settings: PeerSettings) -> None:
    """Train with rank 0, session after session, until it has left.

    Raises:
        KnownError: the model cannot be trained on one of the ranks.
        P2PDilocoError: this rank cannot go on, or another is missing.
    """
    is_first = True  # what an earlier session has freed may still belong to this process
    while (order := island.await_training()) is not None:
        try:
            if is_first:
                _check_device(island, RankOrder(**json.loads(order)), settings)
            is_first = False
            steps = island.build(lambda: _build(island, RankOrder(**json.loads(order)), settings))
        except P2PDilocoError as error:
            raise KnownError(str(error)) from error
        while (turn := island.call(TURN, lambda reports: None)) != THE_END and not island.is_over:
            if turn is not None:
                progress, windows = turn
                steps.loop.set_progress(progress)
                steps.use_batch(windows)
                with island.exchanging():
                    steps.make()


def _check_device(island: Island, order: RankOrder, settings: PeerSettings) -> None:
    """Refuse a run that does not fit into the memory of this rank's device; rank 0 has compared the host's."""
    room = room_here(choose_device(settings.device), ranks=island.ranks.count, has_shards=order.has_shards)
    check_memory(plan_run(RunManifest.model_validate_json(order.manifest)), replace(room, host_free=sys.maxsize))


def _build(island: Island, order: RankOrder, settings: PeerSettings) -> Steps:
    plan = plan_run(RunManifest.model_validate_json(order.manifest))
    model = build_run_model(plan, settings.model, founds=order.founds)
    stream = RankBatches(island.ranks, None, batch=plan.inner.batch, context=plan.context)
    ranks = RankSteps(island.ranks, has_shards=order.has_shards, uses_all=plan.built_in is not None)
    steps = build_steps(plan, settings, model, stream, ranks=ranks)
    island.attach(model.module, trained(model.module), {KEPT: steps.loop}, settings.state_directory)
    return steps
