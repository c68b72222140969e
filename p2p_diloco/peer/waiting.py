"""Wait for the first of several coroutines, and unwrap exception groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def wait_for_first(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when the first of these ends, or raise its exception; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def result_before(work: Coroutine[Any, Any, _Result], end: Coroutine[Any, Any, None]) -> _Result | None:
    """Return the result of `work`, or raise its exception; cancel it and return None if `end` comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


def first_error(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups, so that people read one sentence instead of a tree."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
