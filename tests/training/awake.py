"""Models of which every part has an effect."""

from __future__ import annotations

import torch

from p2p_diloco.app.models.model import DecoderModel, build_model
from p2p_diloco.config.decoder import ModelShape


def awake(model: DecoderModel, *, seed: int = 3, scale: float = 0.3) -> DecoderModel:
    """Change all parameters, also those that start at zero, so that every part of the model has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def awake_model(shape: ModelShape, *, seed: int = 3, scale: float = 0.3) -> DecoderModel:
    return awake(build_model(shape, seed=0), seed=seed, scale=scale)
