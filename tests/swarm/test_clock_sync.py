"""Swarm time is the local clock plus the median offset to the peers' raw clocks."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.swarm.clock_sync import LASTING_BEATS, LONGEST_ROUND_TRIP_SECONDS, SwarmClock

ANN, BEN, CLEO = (PeerId(sha256(name)) for name in (b"ann", b"ben", b"cleo"))


class Watch:
    """A raw clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def hear(clock: SwarmClock, watch: Watch, peer: PeerId, offset: float, round_trip: float = 0.2) -> None:
    nonce = clock.ask(peer)
    watch.now += round_trip
    clock.hear(peer, nonce, watch.now - round_trip / 2 + offset)


def test_alone_swarm_time_is_the_own_clock() -> None:
    watch = Watch()
    assert SwarmClock(watch).now() == 1000.0


def test_swarm_time_follows_the_median_of_raw_clocks_the_own_one_included() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, 3.0)
    assert abs(clock.offset_seconds - 1.5) < 1e-9, "two clocks meet half-way"
    hear(clock, watch, BEN, 5.0)
    assert abs(clock.offset_seconds - 3.0) < 1e-9
    assert abs(clock.now() - (watch.now + 3.0)) < 1e-9
    hear(clock, watch, CLEO, 1e9)
    assert 3.0 <= clock.offset_seconds <= 5.0, "one mad clock moves nobody beyond sane ones"


def test_half_of_the_round_trip_is_taken_off() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, -2.0, round_trip=4.0)
    assert abs(clock.offset_seconds + 1.0) < 1e-9, "half of -2: the peer's clock and the own one meet half-way"


def test_an_answer_that_took_long_or_that_nobody_asked_for_says_nothing() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=LONGEST_ROUND_TRIP_SECONDS + 0.1)
    clock.hear(BEN, 1, 5.0)
    asked = clock.ask(CLEO)
    clock.ask(CLEO)
    clock.hear(CLEO, asked, 5.0)
    assert clock.offset_seconds == 0.0


def test_an_answer_across_a_step_of_the_own_clock_says_nothing() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=-3600.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_that_is_gone_has_no_say() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, -3.0)
    nonce = clock.ask(BEN)
    clock.forget(ANN)
    clock.forget(BEN)
    clock.hear(BEN, nonce, 0.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_is_asked_until_it_answers_and_then_once_in_a_while() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    assert clock.is_due(ANN, 2.0)
    clock.ask(ANN)
    assert clock.is_due(ANN, 2.0), "the question may have been lost"
    hear(clock, watch, ANN, 0.0)
    assert not clock.is_due(ANN, 2.0)
    watch.now += 2.0 * LASTING_BEATS
    assert clock.is_due(ANN, 2.0)


def test_a_clock_that_was_set_back_asks_everybody_again() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    hear(clock, watch, ANN, 0.0)
    watch.now -= 100.0
    assert clock.is_due(ANN, 2.0)
