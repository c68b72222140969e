"""Learners whose steps are written down: each moves θ by a constant, so that trajectories can be worked out by hand.

Legend: N = elements of all fragments, L = learners, K = 64 elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.vectors import Vector
from research.learners import Tensor

TOKENS_PER_STEP = 10
BLOCK = 64

Wide = npt.NDArray[np.float64]


class ScriptedLearners:
    """Learner i adds `moves[i]` at each step, a number to every element or a vector; fragments have the given lengths.

    Args:
        embeddings: (start, stop) of tensors that are one; what lies between them in a fragment is a tensor each.
    """

    def __init__(
        self,
        moves: Sequence[float] | Wide,
        *,
        starts: Sequence[float] | None = None,
        lengths: Sequence[int] = (2,),
        embeddings: Sequence[tuple[int, int]] = (),
    ) -> None:
        borders = np.cumsum([0, *lengths]).tolist()
        self.fragments = tuple(pairwise(borders))
        self.tensors = _tensors(borders, embeddings)
        self._moves = np.asarray(moves, np.float32)
        starts = starts if starts is not None else [0.0] * len(moves)
        self.local = np.repeat(np.asarray(starts, np.float32)[:, None], borders[-1], axis=1)
        self._steps = [0] * len(moves)

    def __len__(self) -> int:
        return len(self._moves)

    def step(self, learner: int) -> None:
        self.local[learner] += self._moves[learner]
        self._steps[learner] += 1

    def progress(self, share: float) -> None:
        assert 0.0 <= share <= 1.0

    def steps(self, learner: int) -> int:
        return self._steps[learner]

    def tokens(self, learner: int) -> int:
        return TOKENS_PER_STEP * self._steps[learner]

    def read(self, learner: int, fragment: int) -> Vector:
        start, stop = self.fragments[fragment]
        return self.local[learner, start:stop].copy()

    def write(self, learner: int, fragment: int, local_N: Vector) -> None:
        start, stop = self.fragments[fragment]
        self.local[learner, start:stop] = local_N

    def play(self, border, ticks: range) -> None:  # type: ignore[no-untyped-def]
        """Make the ticks, all learners at full speed, and tell `border` of each."""
        for tick in ticks:
            for learner in range(len(self)):
                self.step(learner)
            border(tick)


def at_right_angles(num_learners: int, elements: int) -> Wide:
    """Return moves of length 1 in every block of 64, of which no two learners share a direction; shape (L, N)."""
    return np.tile(np.eye(num_learners, BLOCK), elements // BLOCK)


def lengths_of_blocks(vector_N: Vector) -> list[float]:
    """Return the length of each block of 64."""
    return [float(length) for length in np.linalg.norm(vector_N.reshape(-1, BLOCK), axis=1)]


def _tensors(borders: Sequence[int], embeddings: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    cuts = sorted({*borders, *(cut for embedding in embeddings for cut in embedding)})
    return tuple(
        Tensor(start=start, stop=stop, is_embedding=(start, stop) in embeddings) for start, stop in pairwise(cuts)
    )
