"""Learners whose steps are written down: each moves θ by a constant, so that trajectories can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from p2p_diloco.lab.learning.learners import Tensor
from p2p_diloco.outer.vector import Vector

TOKENS_PER_STEP = 10


class ScriptedLearners:
    """Learner i adds `moves[i]` to every element at each step; fragments have the given lengths."""

    def __init__(
        self, moves: Sequence[float], *, starts: Sequence[float] | None = None, lengths: Sequence[int] = (2,)
    ) -> None:
        borders = np.cumsum([0, *lengths]).tolist()
        self.fragments = tuple(pairwise(borders))
        self.tensors = tuple(Tensor(start=start, stop=stop, is_embedding=False) for start, stop in self.fragments)
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
