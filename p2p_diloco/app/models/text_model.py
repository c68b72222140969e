"""A module that predicts text, whatever it is made of: the built-in decoder, a Hugging Face model, or one of your own.

A batch is a tensor of windows of tokens, shape (B, T + 1): each token but the first of a window is predicted from those
before it, so a batch trains on B · T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.app.models.model import DecoderModel
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.parameters import is_embedding, is_head, trained
from p2p_diloco.wording import first_line

_ROUNDING = 1e-4
"""Largest difference between equal outputs as a share of the largest; a mixture of experts rounds in another order."""

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
    return TextModel(
        module=module, loss=_decoder_loss, context=module.shape.context, vocabulary=module.shape.vocabulary
    )


def _decoder_loss(module: nn.Module, windows_BT: Tensor) -> Tensor:
    assert isinstance(module, DecoderModel)
    return module.loss(windows_BT)


def logits_of(module: nn.Module, tokens_BT: Tensor) -> Tensor | None:
    """Return what a forward pass of tokens gives as logits; None if it gives something else.

    The shape is (B, T, V), or (B, 1, V) of a module that gives the last position alone. Modules of transformers give
    them as `logits`, others by themselves or first in a tuple.
    """
    options = {"use_cache": False} if hasattr(module, "generate") else {}  # of transformers
    try:
        output: Any = module(tokens_BT, **options)
    except Exception:  # of a Python model, which may be called in another way
        return None
    logits: Any = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    is_usual = isinstance(logits, Tensor) and logits.ndim == 3 and logits.is_floating_point()
    return logits if is_usual and len(logits) == len(tokens_BT) else None


def check_text_model(model: TextModel, name: str) -> tuple[str, ...]:
    """Refuse a model that a run would train in vain. Call it once the model is built, before its first step.

    Return a sentence about parameters on which its loss does not depend, such as those of a vision tower.

    Its values must be finite, its loss of a window must be a finite number with a gradient, and an output must not
    depend on later tokens: such a model only learns to copy what it has to predict. A module whose forward pass gives
    no logits is not asked the last.

    Args:
        name: its name in errors.
    Raises:
        ConfigError: what is wrong.
    """
    for key, parameter in model.module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ConfigError(f"parameter {key} of {name} is not finite; load other weights")
    model.module.eval()
    generator = torch.Generator().manual_seed(0)
    device = next(model.module.parameters()).device
    window_1T = torch.randint(model.vocabulary, (1, model.context + 1), generator=generator).to(device)
    try:
        loss: Any = model.loss(model.module, window_1T)
    except Exception as error:  # the model's code may raise any
        reason = first_line(error)
        raise ConfigError(
            f"{name} fails on a window of model.context {model.context} with {model.vocabulary:,} tokens ({reason}); "
            "if the window is too long for it, set a shorter --model.context"
        ) from error
    if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad and bool(loss.isfinite())):
        found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.ndim else repr(loss)
        raise ConfigError(f"the loss of {name} is {found}; expected one finite number that has a gradient")
    _check_order(model, window_1T[:, :-1], name)
    model.module.train()
    used, all_trained = _leaves_of(loss), trained(model.module)
    unused = [key for key, parameter in all_trained.items() if parameter not in used]
    if not unused:
        return ()
    return (
        f"the loss of a text does not depend on {len(unused)} of {len(all_trained)} tensors, such as {unused[0]}, so "
        "they are exchanged without being trained (an expert that this window did not reach may be among them)",
    )


def _leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the tensors that would get a gradient from a loss."""
    nodes, leaves, found = [loss.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in found:
            continue
        found.add(node)
        leaves |= {node.variable} if hasattr(node, "variable") else set()
        nodes += [following for following, _ in node.next_functions]
    return leaves


@torch.no_grad()
def _check_order(model: TextModel, tokens_1T: Tensor, name: str) -> None:
    """Refuse a model whose outputs depend on later tokens: it copies instead of predicting."""
    kept = tokens_1T.shape[1] - max(1, tokens_1T.shape[1] // 4)
    changed_1T = tokens_1T.clone()
    changed_1T[:, kept:] = model.vocabulary - 1  # all the same, so that their influence does not average out
    first, second = logits_of(model.module, tokens_1T), logits_of(model.module, changed_1T)
    if first is None or second is None or first.shape[1] != tokens_1T.shape[1]:
        return
    difference = (first - second)[:, :kept].abs()
    allowed = max(_ROUNDING, 4 * torch.finfo(first.dtype).eps) * first.abs().max()
    if kept and bool(difference.max() > allowed):
        config = getattr(model.module, "config", None)
        setting = next((name for name in ("is_decoder", "causal") if getattr(config, name, None) is False), None)
        remedy = (
            f'set "{setting}": true in its config.json'
            if setting is not None
            else "name a decoder-only model, such as one of the families gpt2, llama or qwen3"
        )
        raise ConfigError(
            f"{name} looks ahead: its first {kept} outputs change by up to {difference.max():.2g} with the tokens "
            f"after them, so it cannot be trained as a causal language model; {remedy}"
        )


class WithLoss(nn.Module):
    """A model whose forward pass is its loss, for wrappers that act on a forward pass."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.module = model.module
        self._loss = model.loss

    def forward(self, windows_BT: Tensor) -> Tensor:
        return self._loss(self.module, windows_BT)
