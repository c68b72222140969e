"""The built-in decoder as a manifest describes it, without PyTorch: sizes, tensors, and their names in Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from p2p_diloco.errors import ConfigError

EMBEDDINGS = frozenset({"embedding", "head"})
"""Tensors with a row per token; in a cycle, an island sees only some of the tokens."""
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6
MOST_PARAMETERS = 10**11
"""Maximum parameters of a model in a manifest: more than any joining machine could hold, and far from overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The values that determine the model's tensors; set by the manifest.

    Attributes:
        layers: number of transformer blocks.
        width: elements of the residual stream; a multiple of twice the heads (rotary pairs).
        heads: attention heads.
        feed_forward: inner width of the SwiGLU block.
        context: positions that one training window predicts.
        vocabulary: number of tokens; 256 for bytes.
    Raises:
        ConfigError: a size is not positive, or the width is not a multiple of twice the heads.
    """

    layers: int
    width: int
    heads: int
    feed_forward: int
    context: int
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "feed_forward", "context", "vocabulary"):
            size = getattr(self, name)
            if size < 1:
                raise ConfigError(f"model {name} is {size}; expected at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model width {self.width} does not fit {self.heads} heads; "
                f"expected a multiple of {2 * self.heads}, twice the number of heads"
            )

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters, computed without building the model."""
        return count_parameters(self.layers, self.width, self.feed_forward, self.vocabulary)


def count_parameters(layers: int, width: int, feed_forward: int, vocabulary: int) -> int:
    """Return the number of parameters; does not check the other sizes."""
    block = 4 * width**2 + 3 * width * feed_forward + 2 * width
    return layers * block + 2 * vocabulary * width + width


MODEL_SIZES: dict[str, ModelShape] = {
    "tiny": ModelShape(layers=3, width=160, heads=5, feed_forward=432, context=64),
    "small": ModelShape(layers=8, width=320, heads=5, feed_forward=864, context=256),
    "base": ModelShape(layers=18, width=768, heads=12, feed_forward=1984, context=1024),
}
"""Built-in sizes: about 1, 10 and 125 million parameters."""


def model_shape(size: str) -> ModelShape:
    """Return the built-in shape called `size`.

    Raises:
        ConfigError: the size is unknown; the text lists the known ones.
    """
    try:
        return MODEL_SIZES[size]
    except KeyError:
        raise ConfigError(f"unknown model size {size!r}; expected one of {', '.join(MODEL_SIZES)}") from None


def decoder_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the decoder's tensors by name, in the order of the model's parameters."""
    width, inner = shape.width, shape.feed_forward
    block = {
        "attention_norm.gain": (width,),
        "attention.query_key_value": (3 * width, width),
        "attention.output": (width, width),
        "feed_forward_norm.gain": (width,),
        "feed_forward.gate_up": (2 * inner, width),
        "feed_forward.down": (width, inner),
    }
    tensors: dict[str, tuple[int, ...]] = dict.fromkeys(("embedding", "head"), (shape.vocabulary, width))
    for index in range(shape.layers):
        tensors |= {f"blocks.{index}.{name}": size for name, size in block.items()}
    return tensors | {"norm.gain": (width,)}


_WHOLE_MODEL = {
    "embedding": "model.embed_tokens.weight",
    "norm.gain": "model.norm.weight",
    "head": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.gain": ("input_layernorm.weight",),
    "attention.query_key_value": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "attention.output": ("self_attn.o_proj.weight",),
    "feed_forward_norm.gain": ("post_attention_layernorm.weight",),
    "feed_forward.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.down": ("mlp.down_proj.weight",),
}


def llama_names(name: str) -> tuple[str, ...]:
    """Return Llama's names for the equal parts of a tensor, from top to bottom."""
    if name in _WHOLE_MODEL:
        return (_WHOLE_MODEL[name],)
    _, index, own = name.split(".", 2)
    return tuple(f"model.layers.{index}.{part}" for part in _BLOCK[own])


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """Return `config.json`: values that differ from Llama's defaults, and defaults that matter."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
