"""The first end counts, and the first error is shown."""

from __future__ import annotations

import asyncio

import pytest

from p2p_diloco.errors import NetworkError
from p2p_diloco.peer.waiting import first_error, result_before, wait_for_first
from simulator.virtual_time import run_virtual


def test_the_first_to_end_ends_the_wait_and_the_others() -> None:
    cancelled: list[str] = []

    async def wait(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def scene() -> float:
        await wait_for_first(wait("slow", 100.0), wait("quick", 2.0))
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scene()) == pytest.approx(2.0, abs=0.01)
    assert cancelled == ["slow"]


def test_an_error_is_not_swallowed() -> None:
    async def fail() -> None:
        raise NetworkError("gone")

    with pytest.raises(NetworkError, match="gone"):
        run_virtual(wait_for_first(asyncio.sleep(10.0), fail()))


@pytest.mark.parametrize(("seconds", "result"), [(1.0, "done"), (100.0, None)])
def test_work_is_waited_for_until_the_end_comes(seconds: float, result: str | None) -> None:
    ended: list[float] = []

    async def work() -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(asyncio.get_running_loop().time())

    assert run_virtual(result_before(work(), asyncio.sleep(2.0))) == result
    assert ended == [pytest.approx(min(seconds, 2.0), abs=0.01)]


def test_the_first_error_of_a_tree_is_found() -> None:
    leaf = NetworkError("the daemon died")
    tree = BaseExceptionGroup("tasks", [BaseExceptionGroup("inner", [leaf, ValueError("later")])])
    assert first_error(tree) is leaf
    assert first_error(leaf) is leaf
