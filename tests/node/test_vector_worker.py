"""The thread for vector work: order, errors, few wake-ups, and a silent end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from p2p_diloco.node.vector_actions import VectorWorker
from simulator.virtual_time import AtOnce, run_virtual


def test_results_are_delivered_in_the_loop_and_in_order() -> None:
    async def scene() -> None:
        heard: list[tuple[int, int]] = []
        loop = asyncio.get_running_loop()
        worker, all_came = VectorWorker(loop), loop.create_future()

        def done(result: int, error: BaseException | None) -> None:
            assert error is None
            heard.append((result, threading.get_ident()))
            if len(heard) == 100:
                all_came.set_result(None)

        for number in range(100):
            worker.submit(done, lambda value: value, number)
        await asyncio.wait_for(all_came, 30)
        worker.close()
        assert heard == [(number, threading.get_ident()) for number in range(100)]

    asyncio.run(scene())


def test_an_exception_is_delivered_and_the_next_function_runs() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        worker, outcomes = VectorWorker(loop), asyncio.Queue[tuple[Any, BaseException | None]]()
        worker.submit(lambda *outcome: outcomes.put_nowait(outcome), lambda: 1 // 0)
        worker.submit(lambda *outcome: outcomes.put_nowait(outcome), lambda: 7)
        result, error = await asyncio.wait_for(outcomes.get(), 30)
        assert result is None
        assert isinstance(error, ZeroDivisionError)
        assert await asyncio.wait_for(outcomes.get(), 30) == (7, None)
        worker.close()

    asyncio.run(scene())


def test_a_failing_callback_does_not_affect_the_next_result() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        mistakes: list[Any] = []
        loop.set_exception_handler(lambda _, context: mistakes.append(context["exception"]))
        worker, came = VectorWorker(loop), loop.create_future()

        def fail(result: Any, error: BaseException | None) -> None:
            raise KeyError(result)

        worker.submit(fail, lambda: "first")
        worker.submit(lambda result, _: came.set_result(result), lambda: "second")
        assert await asyncio.wait_for(came, 30) == "second"
        assert [str(mistake) for mistake in mistakes] == ["'first'"]
        worker.close()

    asyncio.run(scene())


def test_waiting_results_are_delivered_by_one_wake_up() -> None:
    async def scene() -> None:
        wake_ups: list[Any] = []
        loop = asyncio.get_running_loop()
        worker = VectorWorker(loop)
        really = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: wake_ups.append(call) or really(*call)  # type: ignore[method-assign]
        heard, all_done = [], threading.Event()
        for number in range(20):
            worker.submit(lambda result, _: heard.append(result), int, number)
        worker.submit(lambda *_: None, all_done.set)
        assert all_done.wait(30)  # in the loop's own thread, which receives nothing meanwhile
        worker.close()
        assert len(wake_ups) == 1
        assert heard == []

    asyncio.run(scene())


def test_a_closed_worker_starts_nothing_and_delivers_nothing() -> None:
    async def scene() -> None:
        heard: list[Any] = []
        begun, may_end, ran = threading.Event(), threading.Event(), []
        worker = VectorWorker(asyncio.get_running_loop())

        def first() -> None:
            begun.set()
            assert may_end.wait(30)

        worker.submit(lambda *outcome: heard.append(outcome), first)
        worker.submit(lambda *outcome: heard.append(outcome), ran.append, 1)
        assert await asyncio.to_thread(begun.wait, 30)
        worker.close()
        may_end.set()
        await asyncio.to_thread(worker.join, 30)
        await asyncio.sleep(0)
        assert heard == ran == []

    asyncio.run(scene())


def test_closing_the_loop_ends_the_thread() -> None:
    may_go_on = threading.Event()

    async def scene() -> VectorWorker:
        worker = VectorWorker(asyncio.get_running_loop())
        worker.submit(lambda *_: None, may_go_on.wait, 30)
        worker.submit(lambda *_: None, int)
        return worker

    worker = asyncio.run(scene())
    may_go_on.set()
    worker.submit(lambda *_: None, int)
    assert worker.join(30)


def test_in_virtual_time_results_are_delivered_in_the_next_loop_iteration() -> None:
    async def scene() -> None:
        heard: list[Any] = []
        worker = AtOnce()
        worker.submit(lambda *outcome: heard.append(outcome), int, "12")
        assert heard == []
        await asyncio.sleep(0)
        assert heard == [(12, None)]

    run_virtual(scene())
