"""The common part of outer algorithms: each looks at its learners at step borders, and sends bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from p2p_diloco.outer.mean import weighted_mean
from p2p_diloco.outer.vector import Vector
from research.learners import Learners, Tensor

Model = tuple[Vector, ...]
"""All parameters, fragment by fragment."""


class Algorithm(ABC):
    """Makes one run of several learners.

    Attributes:
        sent_bytes: sent so far by everybody together, servers included, divided by the number of learners.
    """

    def __init__(self, learners: Learners) -> None:
        self.learners = learners
        self.sent_bytes = 0.0

    @property
    def num_parameters(self) -> int:
        """N."""
        return self.learners.fragments[-1][1]

    def elements(self, fragment: int) -> int:
        """Return the length of a fragment."""
        start, stop = self.learners.fragments[fragment]
        return stop - start

    @abstractmethod
    def border(self, tick: int) -> None:
        """Do what is due after the inner steps of a tick, the first of which is 1."""

    @abstractmethod
    def models(self) -> list[Model]:
        """Return what comes of the run: one model, or several where replicas differ."""

    def is_away(self, learner: int) -> bool:
        """Return whether a learner is away and makes no steps."""
        return False

    def settle(self, tick: int) -> None:  # noqa: B027 - most have nothing under way
        """Let what is under way arrive after the last step, so that all that was learnt is in the models."""

    def read_all(self, learner: int) -> Model:
        """Return a copy of θ."""
        return tuple(self.learners.read(learner, fragment) for fragment in range(len(self.learners.fragments)))

    def tensors_of(self, fragment: int) -> list[Tensor]:
        """Return a fragment's tensors, placed within the fragment."""
        first, last = self.learners.fragments[fragment]
        return [
            Tensor(start=t.start - first, stop=t.stop - first, is_embedding=t.is_embedding)
            for t in self.learners.tensors
            if first <= t.start and t.stop <= last
        ]


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float], tensors: Sequence[Tensor]) -> Vector:
    """Return, tensor by tensor, the mean norm times the direction of the mean direction; embeddings as a plain mean.

    Vectors of many learners are nearly orthogonal, so that a plain mean is shorter than any of them.

    Args:
        vectors: float32, all of shape (N,). Not changed.
        weights: one per vector.
        tensors: where tensors lie in them.
    Source: Decoupled DiLoCo, arXiv 2604.21428, radial-directional averaging, the radial factor read as a mean of norms.
    """
    mean_N = weighted_mean(vectors, weights)
    shares = np.asarray(weights, np.float64) / sum(weights)
    for tensor in tensors:
        if tensor.is_embedding:
            continue
        parts = [vector_N[tensor.start : tensor.stop].astype(np.float64) for vector_N in vectors]
        norms = [float(np.linalg.norm(part_N)) for part_N in parts]
        direction_N = sum(
            share / norm * part_N for share, norm, part_N in zip(shares, norms, parts, strict=True) if norm > 0
        )
        length = float(np.linalg.norm(direction_N))
        if length > 0:
            radius = float(np.dot(shares, norms))
            mean_N[tensor.start : tensor.stop] = np.asarray(direction_N * (radius / length), np.float32)
    return mean_N
