"""Simulated processes: they stop, sleep and end, and each sees its own machine's clock."""

from __future__ import annotations

import asyncio

from simulator.clock import MachineClock
from simulator.process import Process, SimulationLoop, run_in


def loop_of_now() -> SimulationLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulationLoop)
    return loop


async def tick(seen: list[float]) -> None:
    while True:
        seen.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)


def started(seen: list[float]) -> Process:
    loop = loop_of_now()
    process = Process(MachineClock(loop.true_seconds()))
    run_in(process, lambda: loop.create_task(tick(seen), context=process.context))
    return process


async def test_process_reads_the_monotonic_clock_of_its_machine() -> None:
    seen: list[float] = []
    started(seen)
    await asyncio.sleep(2.5)
    assert [round(at, 3) for at in seen] == [0.0, 1.0, 2.0]


async def test_stopped_process_does_nothing_and_then_continues() -> None:
    seen: list[float] = []
    process = started(seen)
    await asyncio.sleep(1.5)
    process.stop()
    await asyncio.sleep(10.0)
    assert len(seen) == 2
    process.go_on()
    await asyncio.sleep(0.1)
    assert [round(at, 3) for at in seen] == [0.0, 1.0, 11.5]


async def test_timers_do_not_run_down_while_a_machine_sleeps() -> None:
    seen: list[float] = []
    process = started(seen)
    await asyncio.sleep(1.5)
    process.stop()
    process.clock.sleep(loop_of_now().true_seconds())
    await asyncio.sleep(100.0)
    process.clock.wake(loop_of_now().true_seconds())
    process.go_on()
    await asyncio.sleep(0.4)
    assert len(seen) == 2
    await asyncio.sleep(0.2)
    assert [round(at, 3) for at in seen] == [0.0, 1.0, 2.0]


async def test_nothing_runs_after_the_end_of_a_process() -> None:
    seen: list[str] = []
    process = Process(MachineClock(loop_of_now().true_seconds()))
    run_in(process, loop_of_now().call_later, 1.0, seen.append, "before")
    run_in(process, loop_of_now().call_later, 2.0, seen.append, "after")
    await asyncio.sleep(1.5)
    process.end()
    await asyncio.sleep(10.0)
    assert seen == ["before"]
