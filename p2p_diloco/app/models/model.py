"""The built-in decoder-only byte model: RMSNorm, rotary positions, SwiGLU, causal attention.

Axes: B sequences of a batch, T positions, W width, H heads, D width of one head, V vocabulary. Input embedding and
output head are untied: at byte level the table is small, and a separate head learns byte statistics within a few dozen
steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_diloco.config.decoder import NORM_EPSILON, ROTARY_BASE, ModelShape

EMBEDDING_STD = 1.0


def build_model(shape: ModelShape, seed: int) -> DecoderModel:
    """Build a float32 model on the CPU whose weights depend only on `shape` and `seed`.

    Weights are uniform: a scaled 24-bit random integer is the same number on every platform, whereas a normal draw uses
    logarithms that differ. Projections back into the residual stream start at zero, so that each block is initially the
    identity and a large learning rate is safe from the first step.
    """
    with torch.device("meta"):
        model = DecoderModel(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.gain"):
                parameter.fill_(1.0)
            elif name.endswith(("attention.output", "feed_forward.down", "head")):
                parameter.zero_()
            else:
                std = EMBEDDING_STD if name == "embedding" else shape.width**-0.5
                unit = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((unit - 0.5) * (std * math.sqrt(12.0)))
    model.rotary_cos, model.rotary_sin = rotary_tables(shape.context, shape.head_width)
    return model


def model_of(shape: ModelShape, parameters: Mapping[str, Tensor]) -> DecoderModel:
    """Return a model with `parameters`, given by name; they are not copied."""
    with torch.device("meta"):
        model = DecoderModel(shape)
    model.load_state_dict(dict(parameters), assign=True)
    return model


class DecoderModel(nn.Module):
    """A decoder-only transformer over `shape.vocabulary` tokens."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RootMeanSquareNorm(shape.width)
        self.head = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        cos_TD, sin_TD = rotary_tables(shape.context, shape.head_width)
        self.register_buffer("rotary_cos", cos_TD, persistent=False)
        self.register_buffer("rotary_sin", sin_TD, persistent=False)

    def forward(self, tokens_BT: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Return logits of shape (B, T, V) for the token after each position.

        Args:
            tokens_BT: tokens; together with the cached positions, at most the shape's context.
            caches: one per block, with the earlier positions; the new positions are added to them.
        """
        start = caches[0].length if caches is not None else 0
        stop = start + tokens_BT.shape[1]
        if stop > self.shape.context:
            raise ValueError(f"got {stop} positions; expected at most {self.shape.context}")
        rotary = (self.rotary_cos[start:stop], self.rotary_sin[start:stop])
        stream_BTW = functional.embedding(tokens_BT, self.embedding)
        for index, block in enumerate(self.blocks):
            stream_BTW = block(stream_BTW, rotary, caches[index] if caches is not None else None)
        return functional.linear(self.norm(stream_BTW), self.head)

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token of windows of shape (B, T + 1)."""
        return token_loss(cast(Tensor, self(tokens_BT[:, :-1])), tokens_BT)


class Block(nn.Module):
    """Attention, then SwiGLU, each added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(shape.width)
        self.attention = CausalAttention(shape.width, shape.heads)
        self.feed_forward_norm = RootMeanSquareNorm(shape.width)
        self.feed_forward = SwiGLU(shape.width, shape.feed_forward)

    def forward(self, stream_BTW: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None = None) -> Tensor:
        """Return the stream after this block, same shape."""
        stream_BTW = stream_BTW + self.attention(self.attention_norm(stream_BTW), rotary, cache)
        return cast(Tensor, stream_BTW + self.feed_forward(self.feed_forward_norm(stream_BTW)))


class KeyValueCache:
    """Keys and values of the positions read so far: several at first, then one at a time.

    With it, generating a byte costs one position instead of the whole window.
    """

    def __init__(self) -> None:
        self._key_value_2BHTD: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self._key_value_2BHTD is None else self._key_value_2BHTD.shape[-2]

    def extend(self, key_value_2BHTD: Tensor) -> Tensor:
        """Add positions and return all of them."""
        if self._key_value_2BHTD is not None:
            assert key_value_2BHTD.shape[-2] == 1, "attention among later positions would need a mask"
            key_value_2BHTD = torch.cat((self._key_value_2BHTD, key_value_2BHTD), dim=-2)
        self._key_value_2BHTD = key_value_2BHTD
        return key_value_2BHTD


class CausalAttention(nn.Module):
    """Causal multi-head attention with rotary positions on queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Parameter(torch.empty(3 * width, width))
        self.output = nn.Parameter(torch.empty(width, width))

    def forward(self, stream_BTW: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None = None) -> Tensor:
        """Return the attention output of each position over itself and earlier positions."""
        batch, length, width = stream_BTW.shape
        mixed = functional.linear(stream_BTW, self.query_key_value)
        mixed_3BHTD = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query_key_2BHTD = rotate(mixed_3BHTD[:2], *rotary)
        query_BHTD, key_BHTD, value_BHTD = query_key_2BHTD[0], query_key_2BHTD[1], mixed_3BHTD[2]
        if cache is not None:
            key_BHTD, value_BHTD = cache.extend(torch.stack((key_BHTD, value_BHTD)))
        gathered_BHTD = functional.scaled_dot_product_attention(
            query_BHTD, key_BHTD, value_BHTD, is_causal=cache is None or length > 1
        )
        return functional.linear(gathered_BHTD.transpose(1, 2).reshape(batch, length, width), self.output)


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate) * up). Source: Shazeer, arXiv 2002.05202."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * inner, width))
        self.down = nn.Parameter(torch.empty(width, inner))

    def forward(self, stream_BTW: Tensor) -> Tensor:
        """Return the block's addition to the stream, same shape."""
        gate, up = functional.linear(stream_BTW, self.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)


class RootMeanSquareNorm(nn.Module):
    """Divide by the root mean square over the last axis, then scale. Source: Zhang & Sennrich, arXiv 1910.07467."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, stream_BTW: Tensor) -> Tensor:
        """Return the normalised stream, same shape."""
        return functional.rms_norm(stream_BTW, self.gain.shape, self.gain, NORM_EPSILON)


def token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token of logits for windows of shape (B, T + 1)."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, shape (context, head_width) each, on the CPU.

    They are on the CPU even within `torch.device("meta")`, where only shapes are needed: an `arange` on that device
    would load PyTorch's compiler, which costs a second of CPU time and 70 MB in every process that reads a manifest.

    Source: Su et al., arXiv 2104.09864.
    """
    even_D = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu")
    frequency_D = 1.0 / ROTARY_BASE ** (even_D / head_width)
    angle_TD = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), frequency_D)
    cos_TD, sin_TD = angle_TD.cos(), angle_TD.sin()
    return torch.cat((cos_TD, cos_TD), dim=-1), torch.cat((-sin_TD, sin_TD), dim=-1)


def rotate(vectors: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair (d, d + D/2) of the last axis by its position's angle; (…, T, D) in and out."""
    return vectors * cos_TD + vectors.roll(vectors.shape[-1] // 2, -1) * sin_TD
