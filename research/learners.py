"""Islands of an experiment: real models on real text, stepped one after the other, read and written as vectors.

Legend: N = all parameters of the model, fragments end to end; a piece is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from p2p_diloco.app.models.evaluation import AnchorEvaluation
from p2p_diloco.app.models.model import DecoderModel, build_model
from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.text.mapped_files import MappedFiles
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.decoder import EMBEDDINGS, MODEL_SIZES, ModelShape, model_shape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.island.parameters import LocalParameters, sizes
from p2p_diloco.outer.fragments import Fragment, plan_fragments
from research.pace import Pace

MICRO = ModelShape(layers=2, width=64, heads=2, feed_forward=176, context=64)
"""Shape with 133 thousand parameters, for large sets of experiments on small machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Position of a tensor in the vector of all parameters. Some algorithms average embeddings differently."""

    start: int
    stop: int
    is_embedding: bool


class Learners(Protocol):
    """Models in training, as seen by an outer algorithm."""

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        """(start, stop) of each fragment in the vector of all parameters."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors, in order."""
        ...

    def __len__(self) -> int:
        """Return the number of learners."""
        ...

    def step(self, learner: int) -> None:
        """Make one inner step."""
        ...

    def progress(self, share: float) -> None:
        """Set the progress of training, 0 to 1."""
        ...

    def steps(self, learner: int) -> int:
        """Return the inner steps made."""
        ...

    def tokens(self, learner: int) -> int:
        """Return the tokens trained on."""
        ...

    def read(self, learner: int, fragment: int) -> Vector:
        """Return a copy of a fragment of θ, float32."""
        ...

    def write(self, learner: int, fragment: int, local_N: Vector) -> None:
        """Set a fragment of θ."""
        ...


def shape_named(size: str) -> ModelShape:
    """Return the shape of a model: `micro`, or a built-in size.

    Raises:
        ConfigError: the size is unknown.
    """
    if size == "micro":
        return MICRO
    if size not in MODEL_SIZES:
        raise ConfigError(f"--size is {size!r}; expected one of micro, {', '.join(MODEL_SIZES)}")
    return model_shape(size)


class LoadedFiles(MappedFiles):
    """Files in memory: windows drawn from a thousand files would map a file for each window."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        super().__init__(files)
        self._text = super().read(0, self.num_bytes)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of bytes `start` to `stop`."""
        return self._text[start:stop].copy()


class TextLearners:
    """Learners on a text, each with its own stream of windows.

    Args:
        windows: windows per step of each learner.
        seed: seed of the initial parameters and of all streams.
        gradients: number of islands that share the batch of each learner, and how the gradient of an island is
            rounded; None: whole gradients.
        paces: batch of each learner; empty: all have `windows`.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        corpus: Corpus,
        rule: InnerRule,
        num_learners: int,
        windows: int,
        num_fragments: int,
        seed: int,
        device: str = "cpu",
        gradients: tuple[int, Callable[[Vector], Vector]] | None = None,
        paces: Sequence[Pace] = (),
    ) -> None:
        self.plan = plan_of(shape, num_fragments)
        self.fragments = fragment_borders(self.plan)
        self.tensors = tensor_positions(self.plan)
        self._loops = []
        paces = paces or [Pace(windows=windows, steps=1.0)] * num_learners
        batches = [pace.windows for pace in paces]
        for stream, pace in zip(streams_of(corpus, shape, seed, batches), paces, strict=True):
            own = replace(
                rule,
                batch=pace.windows,
                learning_rate=rule.learning_rate,
                warmup_steps=max(1, round(rule.warmup_steps * pace.steps)),
            )
            self._loops.append(InnerLoop(build_model(shape, seed), stream, own, device))
            if gradients is not None:
                round_gradients(self._loops[-1], *gradients)
        self._parameters = [LocalParameters(loop.model, self.plan) for loop in self._loops]

    def __len__(self) -> int:
        return len(self._loops)

    def step(self, learner: int) -> None:
        """Make one inner step."""
        self._loops[learner].step()

    def progress(self, share: float) -> None:
        """Set the progress of training, which determines the inner learning rate."""
        for loop in self._loops:
            loop.set_progress(share)

    def steps(self, learner: int) -> int:
        """Return the inner steps made."""
        return self._loops[learner].steps

    def tokens(self, learner: int) -> int:
        """Return the tokens trained on."""
        return self._loops[learner].tokens

    def read(self, learner: int, fragment: int) -> Vector:
        """Return a copy of a fragment of θ."""
        return self._parameters[learner].read(fragment)

    def write(self, learner: int, fragment: int, local_N: Vector) -> None:
        """Set a fragment of θ."""
        self._parameters[learner].write(fragment, 0, len(local_N), local_N)


def streams_of(corpus: Corpus, shape: ModelShape, seed: int, batches: Sequence[int]) -> list[BatchStream]:
    """Return the batches of each learner of a trial, of so many windows."""
    run = Digest(sha256(b"experiment", seed.to_bytes(8, "little")))
    return [
        BatchStream(
            corpus,
            run,
            PeerId(sha256(run, learner.to_bytes(4, "little"))),
            batch=windows,
            context=shape.context,
        )
        for learner, windows in enumerate(batches)
    ]


def round_gradients(loop: InnerLoop, num_islands: int, rounded: Callable[[Vector], Vector]) -> None:
    """Round the gradient of each island before it is added to the sum; add what was lost to its next gradient.

    The batch passes through the model island by island, and each parameter's gradient is rounded after each pass.

    Args:
        num_islands: islands that share the batch.
        rounded: returns a vector as it is received.
    """
    loop.windows_at_once = loop.stream.batch // num_islands
    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(RoundedSum(num_islands, rounded))


class RoundedSum:
    """Hook of a parameter that replaces the last island's part of the sum of gradients by what is sent of it."""

    def __init__(self, num_islands: int, rounded: Callable[[Vector], Vector]) -> None:
        self._rounded = rounded
        self._lost: list[Vector | None] = [None] * num_islands
        self._island = 0
        self._before: Vector | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after a gradient was added"
        sum_N: Vector = parameter.grad.detach().cpu().numpy().reshape(-1)
        before_N = self._before if self._before is not None else np.zeros_like(sum_N)
        lost_N = self._lost[self._island]
        wanted_N = sum_N - before_N + (lost_N if lost_N is not None else np.zeros_like(sum_N))
        sent_N = self._rounded(wanted_N)
        self._lost[self._island] = wanted_N - sent_N
        total_N = before_N + sent_N
        parameter.grad.copy_(torch.from_numpy(total_N).view_as(parameter.grad))
        self._island = (self._island + 1) % len(self._lost)
        self._before = total_N if self._island else None


class Judge:
    """Evaluation of parameters: the loss on pieces of held-out text, always on the same windows.

    Args:
        pieces: the text, once for each piece of held-out text.
        num_tokens: held-out tokens of all pieces together.
    """

    def __init__(
        self,
        shape: ModelShape,
        pieces: Sequence[Corpus],
        num_fragments: int,
        num_tokens: int,
        device: str = "cpu",
    ) -> None:
        plan, share = plan_of(shape, num_fragments), num_tokens // len(pieces)
        self._evaluations = [AnchorEvaluation(shape, plan, piece, num_tokens=share, device=device) for piece in pieces]

    def losses(self, fragments: Sequence[Vector]) -> list[float]:
        """Return the loss of each piece in nats per byte."""
        return [evaluation.loss(fragments) for evaluation in self._evaluations]


def plan_of(shape: ModelShape, num_fragments: int) -> tuple[Fragment, ...]:
    """Return the fragments of a model."""
    with torch.device("meta"):
        return plan_fragments(sizes(DecoderModel(shape)), num_fragments)


def fragment_borders(plan: Sequence[Fragment]) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each fragment in the vector of all parameters."""
    borders, start = [], 0
    for fragment in plan:
        borders.append((start, start + fragment.elements))
        start += fragment.elements
    return tuple(borders)


def tensor_positions(plan: Sequence[Fragment]) -> tuple[Tensor, ...]:
    """Return the positions of all tensors in the vector of all parameters."""
    return tuple(
        Tensor(start=start + slot.start, stop=start + slot.stop, is_embedding=slot.name in EMBEDDINGS)
        for fragment, (start, _) in zip(plan, fragment_borders(plan), strict=True)
        for slot in fragment.tensors
    )
