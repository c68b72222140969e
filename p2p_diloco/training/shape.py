"""The sizes of the built-in model, without PyTorch: checks a manifest's model before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.errors import ConfigError

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
