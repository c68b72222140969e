"""Base class of outer algorithms, which read and write their learners at step borders and count bytes sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from p2p_diloco.codec.vectors import Vector
from research.learners import Learners, Tensor
from simulator.maths import weighted_mean

Model = tuple[Vector, ...]
"""All parameters of a model, by fragment."""


class Algorithm(ABC):
    """An outer algorithm in one run of several learners.

    Attributes:
        sent_bytes: bytes sent so far by all learners and servers, divided by the number of learners.
    """

    def __init__(self, learners: Learners) -> None:
        self.learners = learners
        self.sent_bytes = 0.0

    @property
    def num_parameters(self) -> int:
        """Number of parameters, N."""
        return self.learners.fragments[-1][1]

    def elements(self, fragment: int) -> int:
        """Return the length of a fragment."""
        start, stop = self.learners.fragments[fragment]
        return stop - start

    @abstractmethod
    def border(self, tick: int) -> None:
        """Do the outer work that is due after the inner steps of a tick. Ticks start at 1."""

    @abstractmethod
    def models(self) -> list[Model]:
        """Return the result of the run: one model, or several if replicas differ."""

    def is_away(self, learner: int) -> bool:
        """Return whether a learner is away and makes no steps."""
        return False

    def sent_shares(self) -> tuple[float, ...]:
        """Return, for each learner, the length it sent as a share of what it learnt; empty if it is not counted."""
        return ()

    def settle(self, tick: int) -> None:  # noqa: B027 - most algorithms have nothing pending
        """Deliver pending updates after the last step, so that the models include all that was learnt."""

    def read_all(self, learner: int) -> Model:
        """Return a copy of a learner's θ."""
        return tuple(self.learners.read(learner, fragment) for fragment in range(len(self.learners.fragments)))

    def tensors_of(self, fragment: int) -> list[Tensor]:
        """Return the tensors of a fragment, with positions relative to the fragment."""
        first, last = self.learners.fragments[fragment]
        return [
            Tensor(start=t.start - first, stop=t.stop - first, is_embedding=t.is_embedding)
            for t in self.learners.tensors
            if first <= t.start and t.stop <= last
        ]


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float], tensors: Sequence[Tensor]) -> Vector:
    """Return, for each tensor, the mean norm times the direction of the mean direction. Embeddings get a plain mean.

    Vectors of many learners are nearly orthogonal, so a plain mean is shorter than any of them.

    Args:
        vectors: float32, all of shape (N,). Not changed.
        weights: one per vector.
        tensors: positions of the tensors in the vectors.
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
