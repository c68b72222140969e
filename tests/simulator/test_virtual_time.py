"""An event loop in which waiting costs no time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from simulator.virtual_time import VirtualDeadlock, VirtualTimeLoop, run_virtual

WEEKEND_SECONDS = 60 * 3600.0
UNIX_SECONDS = 1.7e9


@pytest.mark.parametrize("start", [0.0, UNIX_SECONDS])
def test_a_weekend_passes_at_once_and_to_the_second(start: float) -> None:
    async def main() -> float:
        await asyncio.sleep(WEEKEND_SECONDS)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(), start=start) == pytest.approx(start + WEEKEND_SECONDS, abs=1e-5)


def test_timers_run_in_the_order_of_their_times() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        ran: list[float] = []
        for seconds in (3.0, 1.0, 2.0):
            loop.call_later(seconds, ran.append, seconds)
        await asyncio.sleep(2.5)
        assert ran == [1.0, 2.0]
        await asyncio.sleep(10)
        return ran

    assert run_virtual(main()) == [1.0, 2.0, 3.0]


def test_a_timeout_expires_even_if_nothing_else_can_happen() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5)


def test_work_for_threads_runs_at_once_in_the_loop() -> None:
    async def main() -> tuple[int, float]:
        thread = await asyncio.to_thread(threading.get_ident)
        return thread, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (threading.get_ident(), 0.0)


def test_an_error_in_work_for_threads_is_raised() -> None:
    def fail() -> None:
        raise KeyError("broken")

    async def main() -> None:
        with pytest.raises(KeyError, match="broken"):
            await asyncio.to_thread(fail)

    run_virtual(main())


def test_a_deadlock_is_an_error_that_names_the_waiting_tasks() -> None:
    async def main() -> None:
        await asyncio.sleep(7)
        await asyncio.create_task(asyncio.Event().wait(), name="the lazy one")

    with pytest.raises(VirtualDeadlock, match=r"at 7\.000 s nothing is ready and no timer is set.*the lazy one"):
        run_virtual(main())


def test_waking_from_another_thread_is_harmless() -> None:
    loop = VirtualTimeLoop()
    seen: list[int] = []
    loop.call_soon_threadsafe(seen.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert seen == [1]
