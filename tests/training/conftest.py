from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2p_diloco.config.decoder import ModelShape


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> ModelShape:
    """Return the shape of a model small enough to build, step and evaluate in milliseconds."""
    return ModelShape(layers=2, width=16, heads=2, feed_forward=24, context=12)
