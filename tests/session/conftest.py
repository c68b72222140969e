"""Make the stage of this folder importable, and use one torch thread in all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    from small_run import OPEN

    yield
    while OPEN:
        OPEN.pop().close()
