"""State of a peer without training: θ is one flat vector, moved from the anchor by a random pseudo-gradient.

Contributing, following and merging are the code of a real peer.
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
from p2p_diloco.island.local_spans import LocalSpans
from p2p_diloco.island.parameters import LocalParameters, lay_end_to_end
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.storage.trace import Trace

STEPS, TOKENS = 100, 100_000
"""Steps and tokens that each island reports since its last contribution."""


def tensors_of(parameters: int) -> list[tuple[str, int]]:
    """Return (name, elements) of the tensors of a `FlatModel`."""
    return [("embedding", parameters // 2), ("head", parameters - parameters // 2)]


class FlatModel(nn.Module):
    """Model for islands that make no steps: no blocks, only two vectors in place of a decoder's largest matrices."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        for name, elements in tensors_of(parameters):
            self.register_parameter(name, nn.Parameter(torch.zeros(elements, 1)))


class _Watch(Trace):
    """Trace that reports entries to a callback instead of recording them."""

    def __init__(self, absorbed: Callable[[float, bool], None]) -> None:
        self._absorbed = absorbed

    def absorbed(self, steps: int, span: SpanId, entry: Digest, own_included: bool) -> None:
        """Report an entry."""
        self._absorbed(time.monotonic(), own_included)

    def _write(self, what: str, **figures: Any) -> None:
        """Write nothing."""


class SyntheticState(TrainedState):
    """State that reports the entries that θ has followed.

    Args:
        absorbed: called by the thread that owns θ for each entry once it is in θ, φ and m, with the monotonic time and
            whether the entry includes this peer's contribution.
    """

    def __init__(self, host: StateHost, *, absorbed: Callable[[float, bool], None]) -> None:
        plan = host.plan
        model = FlatModel(plan.num_parameters)
        lay_end_to_end(model, plan.fragments)
        local = LocalSpans(plan, LocalParameters(model, plan.fragments))
        super().__init__(host, local, trace=_Watch(absorbed))

    def walk(self, seed: int) -> None:
        """Set θ to the anchor minus a pseudo-gradient of independent normal numbers. Nothing may be pending."""
        assert self.begin(), "all spans are there"
        rng = np.random.Generator(np.random.Philox(key=seed))
        for span, state in self.states().items():
            local_N = rng.standard_normal(state.elements, dtype=np.float32)
            np.multiply(local_N, np.float32(-DELTA_SCALE), out=local_N)
            np.add(local_N, state.anchor_N, out=local_N)
            self.local.write(span, local_N)
        self.meter.count(TOKENS, STEPS)
