"""Islands of an experiment: real models on real text, stepped one after the other, read and written as vectors.

Legend: N = all parameters of the model, fragments end to end; a piece is a slice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.outer.fragments import Fragment, plan_fragments
from p2p_diloco.outer.vector import Vector
from p2p_diloco.training.data import BatchStream, Corpus
from p2p_diloco.training.evaluation import AnchorEvaluation
from p2p_diloco.training.inner_loop import InnerLoop, InnerRule
from p2p_diloco.training.model import EMBEDDINGS, MODEL_SIZES, DecoderModel, ModelShape, build_model, model_shape
from p2p_diloco.training.parameters import LocalParameters, sizes

MICRO = ModelShape(layers=2, width=64, heads=2, feed_forward=176, context=64)
"""Shape with 133 thousand parameters, for large sets of experiments on small machines."""
EVALUATION_TOKENS = 32_768


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


class TextLearners:
    """Learners on a text, each with its own stream of windows.

    Args:
        windows: windows per step of each learner.
        seed: seed of the initial parameters and of all streams.
        by_topic: whether each learner draws from its own part of the text instead of the whole text.
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
        by_topic: bool = False,
        device: str = "cpu",
    ) -> None:
        self._rule = replace(rule, batch=windows)
        self.plan = _plan(shape, num_fragments)
        self.fragments = _borders(self.plan)
        self.tensors = _tensors(self.plan)
        run = Digest(sha256(b"experiment", seed.to_bytes(8, "little")))
        self._loops = []
        for learner in range(num_learners):
            peer = PeerId(sha256(run, learner.to_bytes(4, "little")))
            text = corpus.share(learner, num_learners) if by_topic else corpus
            stream = BatchStream(text, run, peer, batch=windows, context=shape.context)
            self._loops.append(InnerLoop(build_model(shape, seed), stream, self._rule, device))
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


class Judge:
    """Evaluation of parameters: the loss on held-out text, always on the same windows."""

    def __init__(
        self,
        shape: ModelShape,
        corpus: Corpus,
        num_fragments: int,
        num_tokens: int = EVALUATION_TOKENS,
        device: str = "cpu",
    ) -> None:
        self._plan = _plan(shape, num_fragments)
        self._evaluation = AnchorEvaluation(shape, self._plan, corpus, num_tokens=num_tokens, device=device)

    def loss(self, fragments: Sequence[Vector]) -> float:
        """Return the held-out loss in nats per byte."""
        return self._evaluation.loss(fragments)


def _plan(shape: ModelShape, num_fragments: int) -> tuple[Fragment, ...]:
    with torch.device("meta"):
        return plan_fragments(sizes(DecoderModel(shape)), num_fragments)


def _borders(plan: Sequence[Fragment]) -> tuple[tuple[int, int], ...]:
    borders, start = [], 0
    for fragment in plan:
        borders.append((start, start + fragment.elements))
        start += fragment.elements
    return tuple(borders)


def _tensors(plan: Sequence[Fragment]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(start=start + slot.start, stop=start + slot.stop, is_embedding=slot.name in EMBEDDINGS)
        for fragment, (start, _) in zip(plan, _borders(plan), strict=True)
        for slot in fragment.tensors
    )
