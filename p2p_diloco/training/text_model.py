"""A module that predicts text, whatever it is made of: the built-in decoder, a Hugging Face model, or one of your own.

A batch is a tensor of windows of tokens, shape (B, T + 1): each token but the first of a window is predicted from those
before it, so a batch trains on B · T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from p2p_diloco.training.model import DecoderModel
from p2p_diloco.training.parameters import is_embedding, is_head, trained

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Returns the mean loss in nats per predicted token of windows of shape (B, T + 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A module, and how it is trained on windows of tokens.

    Attributes:
        module: float32 in all trained parameters.
        loss: its training loss.
        context: number of tokens that a window predicts.
        vocabulary: number of tokens.
    """

    module: nn.Module
    loss: Loss
    context: int
    vocabulary: int

    def roles(self) -> Roles:
        """Return the trained parameters by their part in the model."""
        parts = Roles(embedding=[], matrices=[], vectors=[], others=[])
        for name, tensor in trained(self.module).items():
            if name == "embedding" or is_embedding(self.module, tensor):
                parts.embedding.append(tensor)
            elif tensor.ndim < 2:
                parts.vectors.append(tensor)
            elif tensor.ndim > 2 or name == "head" or is_head(self.module, tensor):
                parts.others.append(tensor)
            else:
                parts.matrices.append(tensor)
        return parts

    def skeleton(self) -> TextModel:
        """Return a copy without values for the trained parameters, for `loss_with`; it shares the frozen ones."""
        memo: dict[int, object] = {id(parameter): parameter for parameter in self.module.parameters()}
        for parameter in trained(self.module).values():
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
        module = deepcopy(self.module, memo)
        return TextModel(module=module.eval(), loss=self.loss, context=self.context, vocabulary=self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Trained parameters by their part in a model; each is in one list.

    Attributes:
        embedding: rows that are looked up by token; a row has a gradient only in batches with its token.
        matrices: the weights of the layers between embedding and head.
        vectors: gains and biases.
        others: the output head, and tensors of three dimensions or more.
    """

    embedding: list[nn.Parameter]
    matrices: list[nn.Parameter]
    vectors: list[nn.Parameter]
    others: list[nn.Parameter]


def decoder_text_model(module: DecoderModel) -> TextModel:
    """Return the built-in decoder as a text model."""
    return TextModel(
        module=module, loss=_decoder_loss, context=module.shape.context, vocabulary=module.shape.vocabulary
    )


def _decoder_loss(module: nn.Module, windows_BT: Tensor) -> Tensor:
    assert isinstance(module, DecoderModel)
    return module.loss(windows_BT)


class WithLoss(nn.Module):
    """A model whose forward pass is its loss, for wrappers that act on a forward pass."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.module = model.module
        self._loss = model.loss

    def forward(self, windows_BT: Tensor) -> Tensor:
        """Return the mean loss of windows."""
        return self._loss(self.module, windows_BT)
