"""Failures that a test can cause between peers."""

from __future__ import annotations

import asyncio

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.weather import Weather
from simulator.virtual_time import run_virtual

A, B, C = (PeerId(bytes([letter]) * 32) for letter in b"abc")


def blocked_pairs(weather: Weather) -> list[str]:
    names = {A: "a", B: "b", C: "c"}
    return [names[one] + names[other] for one, other in ((A, B), (A, C), (B, C)) if weather.is_blocked(one, other)]


def test_a_cut_blocks_both_directions() -> None:
    weather = Weather()
    weather.cut(A, B)
    assert blocked_pairs(weather) == ["ab"]
    assert weather.is_blocked(B, A)
    weather.heal(B, A)
    assert blocked_pairs(weather) == []


def test_a_split_cuts_every_pair_across_it() -> None:
    weather = Weather()
    weather.split([A], [B, C])
    assert blocked_pairs(weather) == ["ab", "ac"]
    weather.heal(A)
    assert blocked_pairs(weather) == []


def test_an_isolated_peer_reaches_nobody_until_healed() -> None:
    weather = Weather()
    weather.isolate(C)
    assert blocked_pairs(weather) == ["ac", "bc"]
    weather.heal(A)
    assert blocked_pairs(weather) == ["ac", "bc"]
    weather.heal()
    assert blocked_pairs(weather) == []


def test_a_stopped_peer_is_blocked_but_not_cut() -> None:
    weather = Weather()
    weather.stall(A)
    assert blocked_pairs(weather) == ["ab", "ac"]
    assert weather.is_stalled(A)
    assert not weather.is_cut(A, B)
    weather.wake(A)
    assert blocked_pairs(weather) == []


def test_the_same_seed_draws_the_same_weather() -> None:
    drawn = [[weather.draw_delay_seconds() for _ in range(5)] for weather in (Weather(1), Weather(1), Weather(2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0.01 <= seconds <= 0.05 for seconds in drawn[0])


def test_losses_occur_at_the_given_rate() -> None:
    calm, rough = Weather(1), Weather(1, loss=0.1)
    assert not any(calm.draw_loss() for _ in range(1000))
    assert 70 <= sum(rough.draw_loss() for _ in range(1000)) <= 130


def test_a_task_that_waits_for_a_change_is_woken() -> None:
    async def main() -> None:
        weather = Weather()
        weather.isolate(A)
        waiting = asyncio.create_task(weather.wait_for_change())
        await asyncio.sleep(1)
        assert not waiting.done()
        weather.heal()
        await waiting

    run_virtual(main())


def test_a_thin_line_is_shared_by_all_its_links_in_each_direction() -> None:
    weather = Weather()
    thin, one, other = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
    weather.limit_line(thin, 100.0)
    assert weather.book_line(one, thin, 200, 10.0) == 12.0
    assert weather.book_line(other, thin, 100, 10.0) == 13.0
    assert weather.book_line(thin, other, 100, 10.0) == 11.0, "the other direction is free"
    assert weather.book_line(one, other, 1000, 10.0) == 10.0
    assert weather.book_line(one, thin, 50, 10.0, shared=False) == 10.0, "control frames go in between"
    assert weather.book_line(one, thin, 100, 20.0) == 21.0
