"""Frames pass a line with a cap in turn, and no later than the cap requires."""

from __future__ import annotations

import asyncio

import pytest

from p2p_diloco.rate import WIRE_SHARE
from p2p_diloco.transport.rate_limit import Pace

RATE = 100_000.0


def now() -> float:
    return asyncio.get_running_loop().time()


async def pass_pieces(pace: Pace, num_pieces: int, passed: list[str], name: str) -> None:
    for _ in range(num_pieces):
        await pace.wait_for(pace.piece_bytes)
        passed.append(name)


async def test_pieces_pass_at_the_rate_of_the_cap() -> None:
    pace = Pace(RATE)
    await pass_pieces(pace, 200, [], "one")
    assert now() == pytest.approx(200 * WIRE_SHARE * pace.piece_bytes / RATE, rel=0.02)


async def test_long_and_short_senders_alternate_piece_by_piece() -> None:
    pace, passed = Pace(RATE), list[str]()
    await asyncio.gather(pass_pieces(pace, 100, passed, "much"), pass_pieces(pace, 3, passed, "little"))
    assert passed[:12].count("little") == 3, "after the burst, pieces alternate"


async def test_later_frames_wait_for_a_counted_frame() -> None:
    pace = Pace(RATE)
    at = pace.count(200_000)
    assert at == pytest.approx(WIRE_SHARE * 2.0, rel=0.1)
    assert now() == 0.0
    assert pace.debt_bytes() == pytest.approx(at * RATE)
    await pace.wait_for(1)
    assert now() >= at


async def test_without_a_cap_nothing_waits_and_bookings_keep_their_time_under_a_new_one() -> None:
    pace = Pace(None)
    assert not pace.is_capped
    await pace.wait_for(10**9)
    assert pace.count(10**9) == now() == pace.debt_bytes() == 0.0
    pace.set_rate(RATE)
    assert pace.is_capped
    at = pace.count(200_000)
    pace.set_rate(RATE / 2)
    assert pace.count(100_000) == pytest.approx(at + WIRE_SHARE * 2.0, rel=0.01)
    pace.set_rate(None)
    await pace.wait_for(10**9)
    assert now() == 0.0
