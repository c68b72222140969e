"""Run tests that are coroutines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from simulator.virtual_time import VirtualTimeLoop


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with closing(asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(0.0))) as runner:
        yield runner
