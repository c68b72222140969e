"""Swarm time is the local clock plus the median offset to the members' clocks."""

from __future__ import annotations

import math

import pytest

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.swarm.clock_sync import (
    LASTING_BEATS,
    LONGEST_ROUND_TRIP_SECONDS,
    SLOWEST,
    SwarmClock,
    steady_unix_seconds,
)

ANN, BEN, CLEO = (PeerId(sha256(name)) for name in (b"ann", b"ben", b"cleo"))


class Watch:
    """A raw clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def member_clock(watch: Watch, *voices: PeerId, takes_part: bool = False) -> SwarmClock:
    """Return the clock of a member, for which those of `voices` count too."""
    clock = SwarmClock(watch)
    clock.listen_to(voices or (ANN, BEN, CLEO), is_voice=True, takes_part=takes_part)
    return clock


def hear(clock: SwarmClock, watch: Watch, peer: PeerId, offset: float, round_trip: float = 0.2) -> None:
    nonce = clock.ask(peer)
    watch.now += round_trip
    clock.hear(peer, nonce, watch.now - round_trip / 2 + offset)


def test_alone_swarm_time_is_the_own_clock() -> None:
    watch = Watch()
    assert SwarmClock(watch).now() == 1000.0


def test_swarm_time_follows_the_median_of_raw_clocks_the_own_one_included() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, 3.0)
    assert abs(clock.offset_seconds - 1.5) < 1e-9, "two clocks meet half-way"
    hear(clock, watch, BEN, 5.0)
    assert abs(clock.offset_seconds - 3.0) < 1e-9
    assert abs(clock.now() - (watch.now + 3.0)) < 1e-9
    hear(clock, watch, CLEO, 1e9)
    assert 3.0 <= clock.offset_seconds <= 5.0, "one mad clock moves nobody beyond sane ones"


def test_half_of_the_round_trip_is_taken_off() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -2.0, round_trip=4.0)
    assert abs(clock.offset_seconds + 1.0) < 1e-9, "half of -2: the peer's clock and the own one meet half-way"


def test_an_answer_that_took_long_or_that_nobody_asked_for_says_nothing() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=LONGEST_ROUND_TRIP_SECONDS + 0.1)
    clock.hear(BEN, 1, 5.0)
    asked = clock.ask(CLEO)
    clock.ask(CLEO)
    clock.hear(CLEO, asked, 5.0)
    assert clock.offset_seconds == 0.0


def test_an_answer_across_a_step_of_the_own_clock_says_nothing() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=-3600.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_that_is_gone_has_no_say() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -3.0)
    nonce = clock.ask(BEN)
    clock.forget(ANN)
    clock.forget(BEN)
    clock.hear(BEN, nonce, 0.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_is_asked_until_it_answers_and_then_once_in_a_while() -> None:
    watch = Watch()
    clock = member_clock(watch)
    assert clock.is_due(ANN, 2.0)
    clock.ask(ANN)
    assert clock.is_due(ANN, 2.0), "the question may have been lost"
    hear(clock, watch, ANN, 0.0)
    assert not clock.is_due(ANN, 2.0)
    watch.now += 2.0 * LASTING_BEATS
    assert clock.is_due(ANN, 2.0)


def test_a_clock_that_was_set_back_asks_everybody_again() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, 0.0)
    watch.now -= 100.0
    assert clock.is_due(ANN, 2.0)


def test_only_those_count_who_are_listened_to_and_who_begins_to_count_is_asked_again() -> None:
    watch = Watch()
    clock = member_clock(watch, ANN)
    hear(clock, watch, BEN, 86_400.0)
    assert clock.offset_seconds == 0.0
    clock.listen_to((ANN, BEN), is_voice=True, takes_part=False)
    assert clock.offset_seconds == 0.0
    assert clock.is_due(BEN, 2.0)
    hear(clock, watch, BEN, 4.0)
    assert clock.counts(BEN)
    assert abs(clock.offset_seconds - 2.0) < 1e-9
    clock.listen_to((ANN,), is_voice=True, takes_part=False)
    assert clock.offset_seconds == 0.0
    assert not clock.counts(BEN)


@pytest.mark.parametrize("said", [1e300, -1e300, math.inf, -math.inf, math.nan, -1.0, 1e12])
def test_a_time_that_no_clock_shows_says_nothing(said: float) -> None:
    watch = Watch()
    clock = member_clock(watch)
    clock.hear(ANN, clock.ask(ANN), said)
    assert clock.offset_seconds == 0.0
    assert clock.is_due(ANN, 2.0)


def test_who_is_no_member_sets_its_own_clock_by_the_members_and_keeps_it_as_one() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    clock.listen_to((ANN, BEN), is_voice=False, takes_part=False)
    hear(clock, watch, ANN, -500.0)
    assert abs(clock.now() - (watch.now - 500.0)) < 1e-9, "all the way, and at once: nothing depends on its time yet"
    hear(clock, watch, BEN, -502.0)
    assert abs(clock.own() - (watch.now - 501.0)) < 1e-9
    clock.listen_to((ANN, BEN), is_voice=True, takes_part=True)
    assert abs(clock.own() - (watch.now - 501.0)) < 1e-9, "as one voice of three it says the swarm's time, not its own"
    clock.forget(ANN)
    clock.forget(BEN)
    watch.now += 10.0
    assert abs(clock.now() - (watch.now - 501.0)) < 1e-9, "left alone it goes on as it was"


def test_who_is_no_member_any_more_goes_on_with_the_time_it_had() -> None:
    watch = Watch()
    clock = member_clock(watch, ANN)
    hear(clock, watch, ANN, 4.0)
    clock.listen_to((BEN,), is_voice=False, takes_part=False)
    assert abs(clock.now() - (watch.now + 2.0)) < 1e-9


def test_time_that_is_ahead_goes_slower_until_it_is_right_and_never_steps_back() -> None:
    watch = Watch()
    clock = member_clock(watch, ANN, takes_part=True)
    hear(clock, watch, ANN, 20.0)
    ahead = clock.now()
    assert abs(ahead - (watch.now + 10.0)) < 1e-9, "forwards it steps"
    clock.forget(ANN)
    assert clock.now() == ahead
    watch.now += 8.0
    assert abs(clock.now() - (ahead + SLOWEST * 8.0)) < 1e-9
    watch.now += 12.0
    assert abs(clock.now() - watch.now) < 1e-9, "10 s are made good in 20 s"
    before = clock.now()
    watch.now -= 3600.0
    assert clock.now() == before


def test_the_clock_of_a_session_shows_unix_time_and_only_goes_on() -> None:
    raw = steady_unix_seconds()
    first = raw()
    assert first > 1.6e9
    assert raw() >= first
