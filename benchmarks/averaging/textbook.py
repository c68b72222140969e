"""The work of opponents around their averaging: a flat pseudo-gradient, and DiLoCo's outer step by PyTorch.

The outer step is the same as ours, so that all do the same work: from the pseudo-gradient to the next anchor.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

LEARNING_RATE, MOMENTUM = 0.7, 0.3
DELTA_SCALE = 0.01
"""How far an island comes from the anchor; no codec of the opponents depends on it."""


class FlatOuter:
    """An anchor of one flat tensor and Nesterov's outer optimiser.

    Attributes:
        delta_N: this peer's pseudo-gradient; what an exchange puts the mean into.
    """

    def __init__(self, parameters: int) -> None:
        self.delta_N = torch.zeros(parameters)
        self._anchor_N = torch.nn.Parameter(torch.zeros(parameters))
        self._optimizer = torch.optim.SGD([self._anchor_N], lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)

    def fill(self, seed: int) -> None:
        """Put the pseudo-gradient of a turn into memory."""
        self.delta_N.normal_(0.0, DELTA_SCALE, generator=torch.Generator().manual_seed(seed))

    def step(self, mean_N: Tensor) -> None:
        """Move the anchor along the mean."""
        self._anchor_N.grad = mean_N
        self._optimizer.step()
        self._anchor_N.grad = None

    def digest(self) -> str:
        """Return a hash of the anchor."""
        return hashlib.sha256(self._anchor_N.detach().numpy().data).hexdigest()


def seed_of(place: int, turn: int) -> int:
    """Return a seed that no other peer and no other turn has."""
    return (turn << 16) + place
