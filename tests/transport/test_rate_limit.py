"""A cap holds over every interval, and a line with waiting bytes is never idle."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.transport.rate_limit import (
    LEAST_BURST_BYTES,
    LEAST_PIECE_BYTES,
    MOST_PIECE_BYTES,
    TokenBucket,
    burst_bytes,
    piece_bytes,
    wire_bytes,
)

RATES = st.floats(1e3, 1e9)
REQUESTS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1_000_000)), min_size=1, max_size=40)


def played(bucket: TokenBucket, requests: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the time at which each request passes; each is made the given seconds after the previous one."""
    now, passed = 100.0, []
    for pause, num_bytes in requests:
        now += pause
        passed.append((bucket.spend(num_bytes, now), num_bytes))
    return passed


@given(RATES, st.floats(0, 1e6), REQUESTS)
def test_no_interval_carries_more_than_the_cap_and_a_burst(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    passed = played(TokenBucket(per_second=rate, burst=burst), requests)
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        carried = sum(num_bytes for _, num_bytes in passed[first : last + 1])
        stretch = passed[last][0] - passed[first][0]
        # The first request may have waited for its own bytes before the interval started.
        assert carried - passed[first][1] <= burst + rate * stretch + 1e-6 * carried + rate * 1e-9


@given(RATES, st.floats(0, 1e6), REQUESTS)
def test_bytes_pass_in_the_order_of_their_requests_and_never_earlier(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    now, before = 100.0, 0.0
    bucket = TokenBucket(per_second=rate, burst=burst)
    for pause, num_bytes in requests:
        now += pause
        at = bucket.spend(num_bytes, now)
        assert at >= now
        assert at >= before
        before = at


@given(RATES, st.floats(0, 1e6), st.lists(st.integers(1, 1_000_000), min_size=1, max_size=40))
def test_a_line_that_always_has_waiting_bytes_is_never_idle(rate: float, burst: float, sizes: list[int]) -> None:
    bucket = TokenBucket(per_second=rate, burst=burst)
    last = [bucket.spend(num_bytes, 0.0) for num_bytes in sizes][-1]
    assert last == pytest.approx(max((sum(sizes) - burst) / rate, 0.0), abs=1e-6)


@given(RATES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_idle_time_saves_at_most_one_burst(rate: float, burst: float, idle_seconds: float) -> None:
    bucket = TokenBucket(per_second=rate, burst=burst)
    bucket.spend(1.0, 0.0)
    now = idle_seconds + (1.0 + burst) / rate
    assert bucket.spend(burst, now) == pytest.approx(now)
    assert bucket.spend(rate, now) == pytest.approx(now + 1.0)


def test_bytes_that_do_not_wait_are_charged_to_later_ones() -> None:
    counted, free = (TokenBucket(per_second=1000.0, burst=0.0) for _ in range(2))
    counted.spend(500, 10.0)
    assert counted.spend(1000, 10.0) == free.spend(1000, 10.0) + 0.5


def test_debt_is_what_was_booked_and_has_not_passed() -> None:
    bucket = TokenBucket(per_second=1000.0, burst=200.0)
    assert bucket.debt(5.0) == 0.0
    bucket.spend(700, 5.0)
    assert bucket.debt(5.0) == pytest.approx(500.0)
    assert bucket.debt(5.4) == pytest.approx(100.0)
    assert bucket.debt(9.0) == 0.0


@given(st.floats(16e3, 1e10))
def test_pieces_and_bursts_are_bounded_and_a_burst_holds_a_piece(rate: float) -> None:
    assert LEAST_PIECE_BYTES <= piece_bytes(rate) <= MOST_PIECE_BYTES
    assert burst_bytes(rate) >= max(LEAST_BURST_BYTES, piece_bytes(rate))
    assert burst_bytes(rate) <= max(LEAST_BURST_BYTES, 0.1 * rate)


def test_a_long_stream_costs_its_share_and_a_small_frame_its_headers() -> None:
    assert wire_bytes(1_000_000) == pytest.approx(1_045_000)
    assert wire_bytes(100, num_frames=1) == pytest.approx(204.5)
