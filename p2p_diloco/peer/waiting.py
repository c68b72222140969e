"""Waiting for one of several ends, and finding the error in a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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


async def result_before(work: Coroutine[Any, Any, _Result], end: Coroutine[Any, Any, None]) -> _Result | None:
    """Return what `work` returns, or raise what it raises; None if `end` came first, and then `work` has ended too."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


def first_error(error: BaseException) -> BaseException:
    """Return the first error in a group of groups; people read one sentence, not a tree."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
