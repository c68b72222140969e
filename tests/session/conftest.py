"""Make the stage of this folder importable, and use one torch thread in all tests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from inspect import iscoroutinefunction
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


@pytest.fixture
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    """Yield what runs a test that is a coroutine: on the stage of sessions."""
    from session_stage import stage_runner

    with closing(stage_runner(monkeypatch) if iscoroutinefunction(request.function) else asyncio.Runner()) as runner:
        yield runner


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    from small_run import OPEN

    yield
    while OPEN:
        OPEN.pop().close()
