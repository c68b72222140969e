"""Model shapes of any size in the proportions of the built-in sizes, with a short context for quick steps."""

from __future__ import annotations

from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.errors import ConfigError

CONTEXT = 32
FEWEST, MOST = 100_000, 1_000_000_000
_HEAD_WIDTH = 64
_WIDTH_OF_A_LAYER = 42.0
"""Ratio of width to layers in the built-in sizes."""
_INNER_STEP = 16


def shape_of(parameters: int) -> ModelShape:
    """Return a shape with approximately this number of parameters.

    Raises:
        ConfigError: the number is too small or too large.
    """
    if not FEWEST <= parameters <= MOST:
        raise ConfigError(f"--parameters names {parameters}; expected {FEWEST:,} to {MOST:,}")
    # Parameters are about 12 width² per layer, and the width determines the number of layers.
    width = max(1, round((parameters * _WIDTH_OF_A_LAYER / 12) ** (1 / 3) / _HEAD_WIDTH)) * _HEAD_WIDTH
    layers = max(1, round(width / _WIDTH_OF_A_LAYER))
    without = ModelShape(layers=layers, width=width, heads=width // _HEAD_WIDTH, feed_forward=1, context=CONTEXT)
    left = parameters - (without.num_parameters - layers * 3 * width)
    inner = max(1, round(left / (layers * 3 * width) / _INNER_STEP)) * _INNER_STEP
    return ModelShape(layers=layers, width=width, heads=width // _HEAD_WIDTH, feed_forward=inner, context=CONTEXT)
