"""Measure an inner step of a run's model on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.text_model import TextModel
from p2p_diloco.app.text.data import BatchStream, Corpus, open_corpus
from p2p_diloco.app.training.inner_loop import InnerLoop, choose_device
from p2p_diloco.config.decoder import MODEL_SIZES, ModelShape
from p2p_diloco.config.inner_rule import InnerRule, inner_rule
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.ids import ZERO_DIGEST, Digest
from p2p_diloco.island.parameters import trained
from p2p_diloco.memory.available import free_memory
from p2p_diloco.signing import SigningKey

BUDGET_SECONDS, PART_SECONDS = 3.0, 1.0
"""Time limits for steps of the whole model, and for steps of a part of it."""
MOST_STEPS = 20
SMALL_STEP = 1e10
"""Operations of a step that is measured whole without an estimate: any core does them within a second."""
MISSING_CORES = 0.3
"""A measurement counts as disturbed if other programs leave this many fewer cores idle than there are threads."""
BYTES_OF_A_PARAMETER = 20
"""Minimum memory per trained parameter: θ, its gradient, two moments, and φ."""


Clock = Callable[[], float]


class Unmeasured(Exception):
    """A step cannot be measured here; the text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured inner step.

    Attributes:
        seconds: duration.
        is_estimated: whether only a part was run: one block of the model and one or two windows of the batch.
        is_disturbed: whether other programs used the processor meanwhile.
    """

    seconds: float
    is_estimated: bool
    is_disturbed: bool


def measure_inner_step(
    manifest: RunManifest,
    *,
    model: TextModel | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> MeasuredStep:
    """Run some inner steps and return how long one takes. On an idle machine this takes a few seconds for any model.

    If whole steps would take longer, it runs one block of the model on one window and on two, and extrapolates to all
    blocks and windows. The text does not matter; it uses the standard library's source.

    Args:
        manifest: manifest of the run.
        model: model of the run, if it is not the built-in one; it is trained by the measurement.
        device: as in the settings of a machine.
        threads: as in the settings; None: PyTorch's default.
    Raises:
        ConfigError: the device does not exist.
        Unmeasured: the model is not built in, or cannot be trained here.
    """
    if manifest.model.is_own_loop:
        raise Unmeasured("the run trains its own model")
    place = choose_device(device)
    if model is None:
        shape = dataclasses.replace(MODEL_SIZES[manifest.model.size], **manifest.model.changes())
        num_parameters = shape.num_parameters
    else:
        if model.vocabulary < 256:
            raise Unmeasured("the model has fewer than 256 tokens, and the measurement uses bytes")
        num_parameters = sum(tensor.numel() for tensor in trained(model.module).values())
    needed, free = BYTES_OF_A_PARAMETER * num_parameters, free_memory()
    if place.type == "cpu" and needed > free:
        raise Unmeasured(
            f"training {num_parameters:,} parameters takes at least {needed / 1e9:.3g} GB of memory, and "
            f"{free / 1e9:.3g} GB are free"
        )
    own_threads = torch.get_num_threads()
    play = partial(_play, manifest, shape, place) if model is None else partial(_play_whole, manifest, model, place)
    try:
        torch.set_num_threads(threads or own_threads)
        step = play(time.perf_counter)
        if step.is_disturbed:
            # Threads that wait for each other suffer most, so the CPU time of a single thread is a better measure.
            torch.set_num_threads(1)
            alone = play(time.process_time)
            fastest = min(step, alone, key=lambda played: played.seconds)
            step = dataclasses.replace(fastest, is_disturbed=True)
        return step
    except (RuntimeError, ValueError) as error:  # from PyTorch: out of device memory, a missing kernel
        raise Unmeasured(f"training fails on {place} ({str(error).partition(chr(10))[0]})") from error
    finally:
        torch.set_num_threads(own_threads)


def _play(manifest: RunManifest, shape: ModelShape, device: torch.device, clock: Clock) -> MeasuredStep:
    rule, corpus = inner_rule(manifest), open_corpus()

    def loop(layers: int, batch: int, of: ModelShape = shape) -> InnerLoop:
        played = dataclasses.replace(of, layers=layers, vocabulary=max(of.vocabulary, 256))
        stream = _stream(corpus, batch, played.context)
        return InnerLoop(build_model(played, 0), stream, dataclasses.replace(rule, batch=batch), device)

    _warm_up(rule, corpus, device, clock)
    watch = _Disturbance(device)
    if 6.0 * shape.num_parameters * rule.batch * shape.context > SMALL_STEP:
        one = _fastest_step(loop(1, 1), PART_SECONDS, clock)
        two = _fastest_step(loop(1, 2), PART_SECONDS, clock) if rule.batch > 1 else one
        estimate = shape.layers * (one + (rule.batch - 1) * max(two - one, 0.0))
        if 2.0 * estimate > BUDGET_SECONDS:
            return MeasuredStep(seconds=estimate, is_estimated=True, is_disturbed=watch.is_disturbed())
    whole = loop(shape.layers, rule.batch)
    _fastest_step(whole, 0.0, clock)  # the first step allocates the optimisers' moments
    seconds = _fastest_step(whole, BUDGET_SECONDS, clock)
    return MeasuredStep(seconds=seconds, is_estimated=False, is_disturbed=watch.is_disturbed())


def _play_whole(manifest: RunManifest, model: TextModel, device: torch.device, clock: Clock) -> MeasuredStep:
    """Measure steps of any model; the first may take long."""
    rule, corpus = inner_rule(manifest), open_corpus()
    _warm_up(rule, corpus, device, clock)
    watch = _Disturbance(device)
    whole = InnerLoop(model, _stream(corpus, rule.batch, model.context), rule, device)
    seconds = _fastest_step(whole, 0.0, clock)
    seconds = min(seconds, _fastest_step(whole, BUDGET_SECONDS, clock))
    return MeasuredStep(seconds=seconds, is_estimated=False, is_disturbed=watch.is_disturbed())


def _warm_up(rule: InnerRule, corpus: Corpus, device: torch.device, clock: Clock) -> None:
    """Make a step of the smallest model, for PyTorch's one-time setup."""
    tiny = dataclasses.replace(MODEL_SIZES["tiny"], layers=1)
    stream = _stream(corpus, 1, tiny.context)
    _fastest_step(InnerLoop(build_model(tiny, 0), stream, dataclasses.replace(rule, batch=1), device), 0.0, clock)


def _stream(corpus: Corpus, batch: int, context: int) -> BatchStream:
    return BatchStream(corpus, Digest(ZERO_DIGEST), SigningKey(bytes(32)).peer, batch=batch, context=context)


class _Disturbance:
    """Watches whether other programs use the processor, from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._by_others = time.perf_counter(), _processor_seconds_of_others()

    def is_disturbed(self) -> bool:
        taken = (_processor_seconds_of_others() - self._by_others) / (time.perf_counter() - self._began)
        missing = torch.get_num_threads() + taken - (psutil.cpu_count() or 1)
        return self._device.type == "cpu" and missing > MISSING_CORES


def _processor_seconds_of_others() -> float:
    """Return the CPU seconds that this machine has spent on other processes since it was booted."""
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system) - time.process_time()


def _fastest_step(loop: InnerLoop, budget_seconds: float, clock: Clock) -> float:
    """Run steps until the time is used up, at least one; return the shortest, which was disturbed least."""
    end, steps = time.perf_counter() + budget_seconds, list[float]()
    while not steps or (time.perf_counter() < end and len(steps) < MOST_STEPS):
        began = clock()
        loop.step()  # waits for the device, because it reads loss and norm
        steps.append(clock() - began)
    return min(steps)
