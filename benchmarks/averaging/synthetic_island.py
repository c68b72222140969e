"""A peer's state that nobody trains: θ is one flat vector, and as far from the anchor as it is told to be.

All else is the very code of a volunteer: contributing, following, merging.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.averaging.textbook import DELTA_SCALE
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.peer.local_spans import LocalSpans
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.storage.trace import Trace
from p2p_diloco.training.parameters import LocalParameters, lay_end_to_end

STEPS, TOKENS = 100, 100_000
"""What an island says to have trained since its last contribution; the same for all."""


def tensors_of(parameters: int) -> list[tuple[str, int]]:
    """Return (name, elements) of the tensors of a `FlatModel`."""
    return [("embedding", parameters // 2), ("head", parameters - parameters // 2)]


class FlatModel(nn.Module):
    """A model without blocks, for islands that make no step: two vectors where a decoder has its largest matrices."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        for name, elements in tensors_of(parameters):
            self.register_parameter(name, nn.Parameter(torch.zeros(elements, 1)))


class _Watch(Trace):
    """Hears of entries where others write them down."""

    def __init__(self, absorbed: Callable[[float, bool], None]) -> None:
        self._absorbed = absorbed

    def absorbed(self, steps: int, span: SpanId, entry: Digest, own_included: bool) -> None:
        """Count an entry."""
        self._absorbed(time.monotonic(), own_included)

    def _write(self, what: str, **figures: Any) -> None:
        """Write nothing."""


class SyntheticState(TrainedState):
    """Counts what θ follows.

    Args:
        absorbed: called for each entry once it is in θ, φ and m: when by the monotonic clock, and whether this peer's
            contribution is in it; by the thread that θ belongs to.
    """

    def __init__(self, plan: RunPlan, *, absorbed: Callable[[float, bool], None], **more: Any) -> None:
        model = FlatModel(plan.num_parameters)
        lay_end_to_end(model, plan.fragments)
        local = LocalSpans(plan, LocalParameters(model, plan.fragments))
        super().__init__(plan, local, trace=_Watch(absorbed), **more)

    def walk(self, seed: int) -> None:
        """Go from the anchor to where a pseudo-gradient of independent normal numbers leads; while nothing is due."""
        assert self.begin(), "all spans are there"
        rng = np.random.Generator(np.random.Philox(key=seed))
        for span, state in self.states().items():
            local_N = rng.standard_normal(state.elements, dtype=np.float32)
            np.multiply(local_N, np.float32(-DELTA_SCALE), out=local_N)
            np.add(local_N, state.anchor_N, out=local_N)
            self.local.write(span, local_N)
        self.counts.steps += STEPS
        self.counts.tokens += TOKENS
