"""Waiting for one of several ends, and finding the error in a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def wait_for_first(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when one of these ends, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def first_error(error: BaseException) -> BaseException:
    """Return the first error in a group of groups; people read one sentence, not a tree."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
