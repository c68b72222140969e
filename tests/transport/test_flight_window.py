"""Unread bytes on a lane are bounded by what arrives within a moment, and all bytes are accounted for."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.transport.outbox import (
    AT_ONCE_SECONDS,
    FEWEST_BYTES,
    FIRST_BYTES,
    LONGEST_MOMENT_SECONDS,
    LONGEST_WAY_SECONDS,
    MOMENT_SECONDS,
    MOST_BYTES,
    VERY_LATE_SECONDS,
    WAYS,
    FlightWindow,
)

KIB = 1024


def carry(
    window: FlightWindow,
    rate: float,
    frame_bytes: int,
    seconds: float,
    start: float = 0.0,
    useful_seconds: float = 60.0,
) -> tuple[float, int]:
    """Send frames as fast as the window allows over a line of `rate` bytes per second.

    Args:
        useful_seconds: time until the deadline of a frame when it is sent.
    Returns:
        the longest time that a frame of the second half took, and the number of bytes that arrived.
    """
    line: deque[tuple[float, float, int]] = deque()
    free, now, came, longest = start, start, 0, 0.0
    while now < start + seconds:
        while window.has_room(frame_bytes):
            free = max(free, now) + frame_bytes / rate
            window.send(frame_bytes, now, now + useful_seconds)
            line.append((now, free, frame_bytes))
        sent_at, now, num_bytes = line.popleft()
        assert window.read(num_bytes, now) == num_bytes
        came += num_bytes
        if now > start + seconds / 2:
            longest = max(longest, now - sent_at)
    window.lose()
    return longest, came


def test_a_frame_of_any_length_is_sent_if_nothing_else_is_in_flight() -> None:
    window = FlightWindow()
    assert window.has_room(10 * FIRST_BYTES)
    window.send(10 * FIRST_BYTES, 0.0, 60.0)
    assert not window.has_room(1)
    assert window.read(10 * FIRST_BYTES, 0.1) == 10 * FIRST_BYTES
    assert window.has_room(10 * FIRST_BYTES)


@pytest.mark.parametrize(
    ("useful_seconds", "moment_seconds"), [(1.0, MOMENT_SECONDS), (60.0, MOMENT_SECONDS), (9.0, LONGEST_MOMENT_SECONDS)]
)
@pytest.mark.parametrize("rate", [20e3, 100e3, 1e6])
def test_on_a_thin_line_frames_take_a_moment_and_the_line_is_used(
    rate: float, useful_seconds: float, moment_seconds: float
) -> None:
    frame_bytes = 16 * KIB
    longest, came = carry(FlightWindow(), rate, frame_bytes, 120.0, useful_seconds=useful_seconds)
    way_seconds = min(frame_bytes / rate, LONGEST_WAY_SECONDS)
    assert longest <= max(WAYS * way_seconds + moment_seconds, 1.25 * FEWEST_BYTES / rate)
    assert came >= 0.95 * rate * 120.0


def test_on_a_wide_line_the_window_opens_up_to_its_limit() -> None:
    window = FlightWindow()
    carry(window, 1e9, 256 * KIB, 2.0)
    assert window.window_bytes == MOST_BYTES


@pytest.mark.parametrize("way_seconds", [0.2, 0.45, 0.8])
def test_on_a_long_line_the_window_opens_as_on_a_short_one(way_seconds: float) -> None:
    window, now = FlightWindow(), 0.0
    for _ in range(40):
        num_frames = 0
        while window.has_room(64 * KIB):
            window.send(64 * KIB, now, now + 60.0)
            num_frames += 1
        now += way_seconds + num_frames * 64 * KIB / 12.5e6
        window.read(num_frames * 64 * KIB, now)
    assert window.window_bytes >= 0.25 * 12.5e6, "what this line carries in a quarter of a second"


def test_on_a_long_line_that_loses_packets_the_window_opens() -> None:
    """A frame of 45 packets loses one in most cases, and arrives after another way there and back."""
    window, now, way_seconds = FlightWindow(), 0.0, 0.75
    window.send(1000, now, now + 60.0)
    now += way_seconds
    window.read(1000, now)
    for _ in range(40):
        num_frames = 0
        while window.has_room(64 * KIB):
            window.send(64 * KIB, now, now + 60.0)
            num_frames += 1
        now += 2 * way_seconds + num_frames * 64 * KIB / 1.25e6
        window.read(num_frames * 64 * KIB, now)
    assert window.window_bytes >= 0.4 * 1.25e6, "what 10 Mbit/s carry in 0.4 s"


def test_bursts_of_a_round_open_the_window_where_each_frame_waits_for_a_lost_packet() -> None:
    """As measured from a home to the bootstrap peer, 0.36 s there and back: all of its 480 KiB, every 10 s."""
    window, rate, way_seconds, lost_seconds = FlightWindow(), 750e3, 0.36, 0.8
    for burst in range(10):
        now, left, began = 10.0 * burst, 480 * KIB, 10.0 * burst
        window.send(400, now, now + 6.0)
        window.read(400, now + way_seconds)
        while left:
            num_frames = 0
            while left and window.has_room(60 * KIB):
                window.send(60 * KIB, now, now + 6.0)
                left, num_frames = left - 60 * KIB, num_frames + 1
            now += way_seconds + lost_seconds + num_frames * 60 * KIB / rate
            window.read(num_frames * 60 * KIB, now)
        took = now - began
    assert took <= 2.0, "all at once take 1.8 s; in two halves 3 s"


def test_a_packet_that_is_lost_again_and_again_does_not_close_the_window() -> None:
    window, now, rate, way_seconds = FlightWindow(), 0.0, 500e3, 0.7
    windows = []
    for number in range(60):
        num_frames = 0
        while window.has_room(32 * KIB):
            window.send(32 * KIB, now, now + 60.0)
            num_frames += 1
        lost_seconds = (way_seconds, 3 * way_seconds)[number % 3 == 2]
        now += way_seconds + lost_seconds + num_frames * 32 * KIB / rate
        window.read(num_frames * 32 * KIB, now)
        windows.append(window.window_bytes)
    assert min(windows[10:]) >= 0.5 * rate, "without the best rate it ends at 64 KiB"


def test_a_line_that_turns_thin_is_detected_from_the_bytes_in_flight() -> None:
    window = FlightWindow()
    carry(window, 50e6, 64 * KIB, 10.0)
    wide = window.window_bytes
    longest, _ = carry(window, 200e3, 64 * KIB, 2 * wide / 200e3 + 60.0, start=100.0)
    assert longest <= 1.5 * MOMENT_SECONDS
    assert window.window_bytes == pytest.approx(200e3 * MOMENT_SECONDS, rel=0.35)


def test_a_window_that_was_opened_wide_closes_for_bursts_that_do_not_fill_it() -> None:
    window = FlightWindow()
    carry(window, 50e6, 64 * KIB, 10.0)
    frame_bytes, rate, longest = 64 * KIB, 500e3, 0.0
    for burst in range(4):
        now = free = 100.0 + 8.0 * burst
        longest, waiting = 0.0, 40
        line: deque[tuple[float, float]] = deque()
        while waiting or line:
            while waiting and window.has_room(frame_bytes):
                free = max(free, now) + frame_bytes / rate
                window.send(frame_bytes, now, now + 60.0)
                line.append((now, free))
                waiting -= 1
            sent_at, now = line.popleft()
            window.read(frame_bytes, now)
            longest = max(longest, now - sent_at)
    assert longest <= 2 * MOMENT_SECONDS, "of the last burst; all 40 frames at once take 5 s"


def test_a_window_that_is_never_full_does_not_open() -> None:
    window = FlightWindow()
    for second in range(1000):
        window.send(FIRST_BYTES // 4, float(second), 1e9)
        window.read(FIRST_BYTES // 4, second + 0.01)
    assert window.window_bytes == FIRST_BYTES


def test_the_first_late_frame_of_a_full_window_gives_the_rate() -> None:
    window = FlightWindow()
    for _ in range(16):
        window.send(FIRST_BYTES // 16, 0.0, 2.0)
    for number in range(1, 17):
        window.read(FIRST_BYTES // 16, 0.3 * number)
        come = FIRST_BYTES / 16 / 0.3 * (WAYS * 0.3 + MOMENT_SECONDS)
        expected = FIRST_BYTES if number < 8 else max(come, FEWEST_BYTES)
        assert window.window_bytes == pytest.approx(expected)


def test_a_frame_that_is_neither_prompt_nor_late_opens_the_window_to_what_comes_in_a_moment() -> None:
    window, seconds = FlightWindow(), WAYS * LONGEST_WAY_SECONDS + (AT_ONCE_SECONDS + MOMENT_SECONDS) / 2
    window.send(FIRST_BYTES, 0.0, 60.0)
    window.read(FIRST_BYTES, seconds)
    in_a_moment = FIRST_BYTES / seconds * (WAYS * LONGEST_WAY_SECONDS + MOMENT_SECONDS)
    assert FIRST_BYTES < window.window_bytes == pytest.approx(in_a_moment)


def test_a_very_late_frame_makes_the_window_forget_what_the_line_carried_before() -> None:
    window = FlightWindow()
    carry(window, 1e6, 64 * KIB, 10.0)
    num_frames = 0
    while window.has_room(64 * KIB):
        window.send(64 * KIB, 11.0, 71.0)
        num_frames += 1
    way_seconds = 64 * KIB / 1e6
    window.read(64 * KIB, 11.0 + VERY_LATE_SECONDS)
    assert window.window_bytes == pytest.approx(
        max(64 * KIB / VERY_LATE_SECONDS * (WAYS * way_seconds + MOMENT_SECONDS), FEWEST_BYTES)
    ), "the best rate of the last 30 s would leave it open"


def test_a_lost_stream_discards_its_bytes_in_flight() -> None:
    window = FlightWindow()
    window.send(1000, 0.0, 60.0)
    window.lose()
    assert (window.bytes_under_way, window.oldest) == (0, None)
    window.send(500, 1.0, 60.0)
    assert window.read(1000, 1.1) == 500, "half of it may have been sent on the lost stream"
    assert (window.bytes_under_way, window.oldest) == (0, None)


Step = tuple[bool, int, float]
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2**31), st.floats(0.0, 100.0)), max_size=60)


@given(STEPS)
def test_the_accounts_are_right_whatever_the_other_end_reports(steps: list[Step]) -> None:
    window, now = FlightWindow(), 0.0
    under_way: deque[int] = deque()
    for sends, num_bytes, seconds in steps:
        now += seconds
        if sends:
            under_way.append(max(num_bytes, 1))
            window.send(under_way[-1], now, now + 10.0)
        else:
            left = min(num_bytes, sum(under_way))
            assert window.read(num_bytes, now) == left
            while left:
                part = min(left, under_way[0])
                left -= part
                under_way[0] -= part
                if not under_way[0]:
                    under_way.popleft()
        assert window.bytes_under_way == sum(under_way)
        assert (window.oldest is None) == (not under_way)
        assert FEWEST_BYTES <= window.window_bytes <= MOST_BYTES
        assert window.has_room(1) == (not under_way or sum(under_way) + 1 <= window.window_bytes)
