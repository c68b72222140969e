"""An island that does not train: θ is one flat vector, and as far from the anchor as it is told to be.

All else is the very code of a volunteer's island: contributing, absorbing, merging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch
from torch import nn

from p2p_diloco.bench.averaging.textbook import DELTA_SCALE
from p2p_diloco.ids import SpanId
from p2p_diloco.island.data import BatchStream
from p2p_diloco.island.model import DecoderModel, ModelShape
from p2p_diloco.outer.state import SpanState
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.trainer.island import Island
from p2p_diloco.trainer.run_plan import RunPlan

STEPS, TOKENS = 100, 100_000
"""What an island says to have trained since its last contribution; the same for all."""


def tensors_of(parameters: int) -> list[tuple[str, int]]:
    """Return (name, elements) of the tensors of a `FlatModel`."""
    return [("embedding", parameters // 2), ("head", parameters - parameters // 2)]


class FlatModel(DecoderModel):
    """A model without blocks, for islands that make no step: two vectors where a decoder has its largest matrices."""

    def __init__(self, shape: ModelShape, parameters: int) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        for name, elements in tensors_of(parameters):
            self.register_parameter(name, nn.Parameter(torch.zeros(elements, 1)))


class NoText:
    """A stream that nobody reads."""

    context = 1
    position = 0


class SyntheticIsland(Island):
    """Counts what it absorbs.

    Args:
        absorbed: told of each entry once it is in θ, φ and m: when by the monotonic clock, and whether this island's
            contribution is in it; by the island's thread.
    """

    def __init__(self, *, plan: RunPlan, absorbed: Callable[[float, bool], None]) -> None:
        model = FlatModel(plan.shape, plan.num_parameters)
        super().__init__(plan=plan, model=model, stream=cast(BatchStream, NoText()), device=torch.device("cpu"))
        self._absorbed = absorbed

    def absorb(self, update: SpanUpdate) -> None:
        """Follow an entry."""
        super().absorb(update)
        self._absorbed(time.monotonic(), update.own_included)

    def begin(self, states: Mapping[SpanId, SpanState]) -> None:
        """Begin from these spans; before the thread runs."""
        for span, state in states.items():
            self.take(span, state)
        assert self.load(), "all spans are there"

    def walk(self, seed: int) -> None:
        """Go from the anchor to where a pseudo-gradient of independent normal numbers leads; while nothing is due."""
        rng = np.random.Generator(np.random.Philox(key=seed))
        for span, state in self.states.items():
            place = self._plan.places[span]
            local_N = rng.standard_normal(state.elements, dtype=np.float32)
            np.multiply(local_N, np.float32(-DELTA_SCALE), out=local_N)
            np.add(local_N, state.anchor_N, out=local_N)
            self.parameters.write(span.fragment, place.start, place.stop, local_N)
        self.loop.steps += STEPS
        self.loop.tokens += TOKENS
