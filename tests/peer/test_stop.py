"""Three ways to stop a peer, each of which can be awaited."""

from __future__ import annotations

import asyncio

from p2p_diloco.peer.stop import StopRequest
from simulator.virtual_time import run_virtual


def test_nothing_stops_without_a_request() -> None:
    async def scene() -> None:
        stop = StopRequest()
        waits = [
            asyncio.ensure_future(wait)
            for wait in (stop.wait_for_leave(), stop.wait_for_stop(), stop.wait_for_last_round())
        ]
        await asyncio.wait(waits, timeout=3600)
        assert not stop.is_leaving
        assert not any(wait.done() for wait in waits)

    run_virtual(scene())


def test_the_first_ctrl_c_only_asks_to_leave() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.leave()
        await stop.wait_for_leave()
        hurry = asyncio.ensure_future(stop.wait_for_stop())
        await asyncio.wait({hurry}, timeout=3600)
        assert stop.is_leaving
        assert not hurry.done()

    run_virtual(scene())


def test_the_second_ctrl_c_stops_at_once_even_without_a_first() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.stop_now()
        await stop.wait_for_leave()
        await stop.wait_for_stop()
        assert stop.is_leaving

    run_virtual(scene())


def test_the_first_request_for_a_last_round_counts() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.end_after(7)
        stop.end_after(9)
        assert await stop.wait_for_last_round() == 7
        assert not stop.is_leaving

    run_virtual(scene())
