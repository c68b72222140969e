"""Held-out loss, always over the same windows, so that two figures differ only by what was learnt between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2p_diloco.island.data import Corpus, held_out_windows
from p2p_diloco.island.model import DecoderModel, ModelShape, build_model
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.fragments import Fragment

EVALUATION_TOKENS = 6144
"""Tokens of one evaluation: below half a second for the tiny model on one CPU core, see `held_out_loss`."""
_BATCH_TOKENS = 2048


def held_out_loss(model: DecoderModel, corpus: Corpus, *, num_tokens: int = EVALUATION_TOKENS) -> float:
    """Return the mean loss in nats per byte over a fixed set of held-out windows of about `num_tokens` in all.

    For the thread that trains this model. Its parameters and their gradients stay as they are.

    Raises:
        ConfigError: no held-out stretch is as long as the model's context.
    """
    return _mean_loss(model, _windows(model.shape, corpus, num_tokens))


class AnchorEvaluation:
    """Evaluates parameter vectors in a model of its own, so that any thread may do it while training goes on.

    Not for several threads at once.
    """

    def __init__(
        self,
        shape: ModelShape,
        fragments: Sequence[Fragment],
        corpus: Corpus,
        *,
        device: torch.device | str = "cpu",
        num_tokens: int = EVALUATION_TOKENS,
    ) -> None:
        self._model = build_model(shape, seed=0).to(device)
        self._parameters = LocalParameters(self._model, fragments)
        # Read once, here: from now on the corpus, which training reads, is not touched by another thread.
        self._windows_BT = _windows(shape, corpus, num_tokens)

    def loss(self, vectors: Sequence[NDArray[np.float32]]) -> float:
        """Return the held-out loss in nats per byte of `vectors`, one per fragment by index."""
        self._parameters.load_flat(vectors)
        return _mean_loss(self._model, self._windows_BT)


def anchor_loss(
    shape: ModelShape,
    fragments: Sequence[Fragment],
    vectors: Sequence[NDArray[np.float32]],
    corpus: Corpus,
    *,
    device: torch.device | str = "cpu",
    num_tokens: int = EVALUATION_TOKENS,
) -> float:
    """Return the held-out loss of one set of vectors; for many sets keep an `AnchorEvaluation`."""
    return AnchorEvaluation(shape, fragments, corpus, device=device, num_tokens=num_tokens).loss(vectors)


def _windows(shape: ModelShape, corpus: Corpus, num_tokens: int) -> Tensor:
    return held_out_windows(corpus, context=shape.context, num_windows=max(1, num_tokens // shape.context))


@torch.no_grad()
def _mean_loss(model: DecoderModel, windows_BT: Tensor) -> float:
    """Return the mean over windows, computed in batches small enough to stay in the cache."""
    device = model.embedding.device
    total = 0.0
    for windows in torch.split(windows_BT, max(1, _BATCH_TOKENS // model.shape.context)):
        total += cast(float, model.loss(windows.to(device)).item()) * len(windows)
    return total / len(windows_BT)
