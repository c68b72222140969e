"""The built-in training: trains the model of the manifest on the run's text, in its own thread."""

from __future__ import annotations

import asyncio
from functools import partial

import torch

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.evaluation import HeldOutLoss, HeldOutWatch
from p2p_diloco.peer.local_spans import describe_device, spans_for
from p2p_diloco.peer.run_model import build_run_model
from p2p_diloco.peer.run_plan import plan_run
from p2p_diloco.peer.run_text import open_run_text, open_stream
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.peer.training import Training, TrainingHost
from p2p_diloco.peer.training_thread import InnerSteps, TrainingThread
from p2p_diloco.storage.inner_state import InnerState
from p2p_diloco.storage.trace import Trace
from p2p_diloco.storage.whole_file import replace_file, write_all
from p2p_diloco.training.corpus_files import list_corpus_files
from p2p_diloco.training.evaluation import AnchorEvaluation, WholeEvaluation
from p2p_diloco.training.inner_loop import InnerLoop, choose_device
from p2p_diloco.training.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.training.precision import choose_precision
from p2p_diloco.training.text_model import TextModel
from p2p_diloco.training.token_shards import TOKENIZER_FILE, TokenText

LAST_STEP_SECONDS = 5.0  # a step on a slow machine may take longer; then do not wait for it


class BuiltInTraining(Training):
    """Trains the model of a manifest on the run's text.

    Args:
        evaluate_seconds: seconds between measurements of the held-out loss; 0: never.
        founds: whether this peer founds the run, so that it needs the initial values of the model.
    """

    owns_process = True

    def __init__(self, *, evaluate_seconds: float = 30.0, founds: bool = False) -> None:
        self.evaluate_seconds = evaluate_seconds
        self._founds = founds
        self._built: TextModel | None = None
        self._thread: TrainingThread | None = None
        self._watch: HeldOutWatch | None = None

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Refuse a missing device or text, and a run whose model cannot be built here."""
        choose_device(settings.device)
        if manifest is not None:
            plan = plan_run(manifest)
            if manifest.model.is_own_loop:
                raise ConfigError(plan.why_no_model())
            open_run_text(manifest.data, settings.data)
            if manifest.model.kind != "built-in":  # whether it can be built shows only when it is
                self._built = build_run_model(plan, settings.model, founds=self._founds)
        elif settings.data is not None:
            list_corpus_files(settings.data)

    def open(self, host: TrainingHost) -> TrainedState:
        """Build the model, its training thread and its evaluation."""
        plan, settings = host.plan, host.settings
        # The first optimiser of a process imports torch._dynamo, which takes seconds.
        text = "starting to train; PyTorch takes a few seconds to load its optimisers"
        host.in_loop(partial(host.report, "starting", text))
        corpus = open_run_text(plan.manifest.data, settings.data)
        if isinstance(corpus, TokenText):
            # For `export`, which has only this folder.
            replace_file(host.folder / TOKENIZER_FILE, partial(write_all, content=corpus.tokenizer()))
        stream = open_stream(corpus, plan, host.run, host.peer, host.incarnation)
        model, self._built = self._built or build_run_model(plan, settings.model, founds=self._founds), None
        device = choose_device(settings.device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None
        precision = choose_precision(plan.inner.precision, settings.precision, device, capability)

        def report_memory(text: str) -> None:
            host.in_loop(partial(host.report, "memory", text))

        loop = InnerLoop(model, stream, plan.inner, device, precision=precision, report=report_memory)
        lay_end_to_end(model.module, plan.fragments)
        trace = Trace(host.folder) if settings.keep_trace else None
        if trace is not None:
            trace.began(stream.position)
        local = spans_for(plan, LocalParameters(model.module, plan.fragments), loop.device)
        products = "" if plan.inner.precision == "float32" == precision.name else f"; {precision}"
        host.in_loop(partial(host.report, "device", describe_device(loop.device, local) + products))
        self.state = TrainedState(
            plan,
            local,
            now=host.now,
            in_loop=host.in_loop,
            died=host.died,
            damaged=host.damaged,
            trace=trace,
            inner=InnerState(host.folder, {"the optimiser": loop}),
            report=host.report,
        )
        steps = InnerSteps(loop, self.state, windows_at_once=settings.windows_at_once, report=report_memory)
        self._thread = TrainingThread(state=self.state, step=steps.step, in_loop=host.in_loop, died=host.died)
        if self.evaluate_seconds > 0:
            if plan.built_in is not None:
                evaluation: AnchorEvaluation | WholeEvaluation = AnchorEvaluation(plan.built_in, plan.fragments, corpus)
            else:
                evaluation = WholeEvaluation(model, plan.fragments, corpus)
            self._watch = HeldOutWatch(plan, evaluation)
        return self.state

    def start(self) -> None:
        """Start the thread; it trains once all spans are loaded."""
        self._opened().start()

    def stop_stepping(self) -> None:
        """Stop making steps, but keep applying entries to θ."""
        self._opened().stop_training()

    def wait_until_idle(self) -> None:
        """Wait until all submitted updates are in φ, m and θ."""
        self._opened().wait_until_idle()

    async def measure(self) -> HeldOutLoss | None:
        """Measure both losses on the held-out text."""
        if self._watch is None or self.state is None:
            return None
        return await self._watch.measure(self.state)

    async def end(self) -> None:
        """Stop the threads."""
        if self._watch is not None:
            self._watch.close()
        if self._thread is not None:
            self._thread.stop()
            # A thread that is inside torch when the interpreter exits aborts the process.
            await asyncio.to_thread(self._thread.join, LAST_STEP_SECONDS)

    def _opened(self) -> TrainingThread:
        assert self._thread is not None, "open it first"
        return self._thread
