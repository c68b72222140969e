"""Work of the other systems around their averaging: a flat pseudo-gradient, and DiLoCo's outer step in PyTorch.

The outer step is the same as ours, so all systems do the same work, from the pseudo-gradient to the next anchor.
"""

from __future__ import annotations

import hashlib
import time

import torch
from torch import Tensor

LEARNING_RATE, MOMENTUM = 0.7, 0.3
DELTA_SCALE = 0.01
"""Standard deviation of a pseudo-gradient; no codec of the other systems depends on it."""


class FlatOuter:
    """An anchor of one flat tensor with a Nesterov outer optimiser.

    Attributes:
        delta_N: this peer's pseudo-gradient; an exchange overwrites it with the mean.
        anchor_N: what the outer steps have made of zeros.
    """

    def __init__(self, parameters: int) -> None:
        self.delta_N = torch.zeros(parameters)
        self.anchor_N = torch.nn.Parameter(torch.zeros(parameters))
        self._optimizer = torch.optim.SGD([self.anchor_N], lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)

    def fill(self, seed: int) -> None:
        """Fill the pseudo-gradient of a turn."""
        self.delta_N.normal_(0.0, DELTA_SCALE, generator=torch.Generator().manual_seed(seed))

    def step(self, mean_N: Tensor) -> None:
        """Move the anchor along the mean."""
        self.anchor_N.grad = mean_N
        self._optimizer.step()
        self.anchor_N.grad = None

    def digest(self) -> str:
        """Return a hash of the anchor."""
        return hashlib.sha256(self.anchor_N.detach().numpy().data).hexdigest()


def seed_of(place: int, turn: int) -> int:
    """Return a seed that is unique to the peer and the turn."""
    return (turn << 16) + place


def wait_for_moment(at: float) -> None:
    """Sleep until `at` on the monotonic clock, which all processes of a machine share."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)
