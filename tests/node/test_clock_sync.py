"""Swarm time is the local clock plus the median offset to the members' clocks."""

from __future__ import annotations

import math
from random import Random

import pytest

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.node.clock_sync import (
    LASTING_BEATS,
    LONGEST_ROUND_TRIP_SECONDS,
    SLOWEST,
    SwarmClock,
    steady_unix_seconds,
)
from p2p_diloco.protocol.clock import RoundClock

ROUNDS = RoundClock(start_seconds=0.0, round_seconds=16.0, num_fragments=2)
PATIENCE = 32.0
ANN, BEN, CLEO = (PeerId(sha256(name)) for name in (b"ann", b"ben", b"cleo"))


class Watch:
    """A raw clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def member_clock(watch: Watch, *sources: PeerId, takes_part: bool = False) -> SwarmClock:
    """Return the clock of a member that has the swarm's time; the clocks of `sources` count too."""
    clock = SwarmClock(watch)
    clock.follow((), is_source=True, takes_part=takes_part)
    clock.follow(sources or (ANN, BEN, CLEO), is_source=True, takes_part=takes_part)
    assert clock.is_settled
    return clock


def started_clock(watch: Watch, *sources: PeerId, latest_round: int = -1, offset: float = 0.0) -> SwarmClock:
    """Return the clock of a member that has just been restarted."""
    clock = SwarmClock(watch, offset_seconds=offset)
    clock.begin(ROUNDS, latest_round=latest_round, patience_seconds=PATIENCE)
    clock.follow(sources, is_source=True, takes_part=False)
    return clock


def hear(
    clock: SwarmClock, watch: Watch, peer: PeerId, offset: float, round_trip: float = 0.2, is_settled: bool = True
) -> None:
    """Let a peer answer whose clock is ahead of the watch by `offset`."""
    nonce = clock.new_request(peer)
    watch.now += round_trip
    clock.take_answer(peer, nonce, watch.now - round_trip / 2 + offset, is_settled=is_settled)


def ahead(clock: SwarmClock, watch: Watch) -> float:
    return clock.now() - watch.now


def test_swarm_time_of_a_lone_peer_is_its_own_clock() -> None:
    watch = Watch()
    assert SwarmClock(watch).now() == 1000.0


def test_swarm_time_follows_the_median_of_all_members_clocks_including_its_own() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, 0.3)
    assert abs(ahead(clock, watch) - 0.15) < 1e-9, "two clocks that differ by little meet half-way"
    hear(clock, watch, BEN, 0.5)
    assert abs(ahead(clock, watch) - 0.3) < 1e-9
    hear(clock, watch, CLEO, 1e9)
    assert abs(ahead(clock, watch) - 0.4) < 1e-9, "one mad clock moves nobody beyond sane ones"


def test_half_of_the_round_trip_is_subtracted() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -0.2, round_trip=4.0)
    assert abs(clock.offset_seconds + 0.1) < 1e-9, "half of -0.2: the peer's clock and the own one meet half-way"


def test_slow_and_unsolicited_answers_are_ignored() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=LONGEST_ROUND_TRIP_SECONDS + 0.1)
    clock.take_answer(BEN, 1, 5.0)
    asked = clock.new_request(CLEO)
    clock.new_request(CLEO)
    clock.take_answer(CLEO, asked, 5.0)
    assert clock.offset_seconds == 0.0


def test_an_answer_across_a_step_of_the_local_clock_is_ignored() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -7.0, round_trip=-3600.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_that_is_gone_does_not_count() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, -3.0)
    nonce = clock.new_request(BEN)
    clock.forget(ANN)
    clock.forget(BEN)
    clock.take_answer(BEN, nonce, 0.0)
    assert clock.offset_seconds == 0.0


def test_a_peer_is_asked_until_it_answers_and_then_occasionally() -> None:
    watch = Watch()
    clock = member_clock(watch)
    assert clock.is_due(ANN, 2.0)
    clock.new_request(ANN)
    assert clock.is_due(ANN, 2.0), "the question may have been lost"
    hear(clock, watch, ANN, 0.0)
    assert not clock.is_due(ANN, 2.0)
    watch.now += 2.0 * LASTING_BEATS
    assert clock.is_due(ANN, 2.0)


def test_a_clock_that_was_set_back_asks_all_peers_again() -> None:
    watch = Watch()
    clock = member_clock(watch)
    hear(clock, watch, ANN, 0.0)
    watch.now -= 100.0
    assert clock.is_due(ANN, 2.0)


def test_only_clocks_of_listed_peers_count_and_a_new_one_is_asked_again() -> None:
    watch = Watch()
    clock = member_clock(watch, ANN)
    hear(clock, watch, BEN, 86_400.0)
    assert clock.offset_seconds == 0.0
    clock.follow((ANN, BEN), is_source=True, takes_part=False)
    assert clock.offset_seconds == 0.0
    assert clock.is_due(BEN, 2.0)
    hear(clock, watch, BEN, 0.4)
    assert clock.counts(BEN)
    assert abs(clock.offset_seconds - 0.2) < 1e-9
    clock.follow((ANN,), is_source=True, takes_part=False)
    assert clock.offset_seconds == 0.0
    assert not clock.counts(BEN)


@pytest.mark.parametrize("said", [1e300, -1e300, math.inf, -math.inf, math.nan, -1.0, 1e12])
def test_an_impossible_time_is_ignored(said: float) -> None:
    watch = Watch()
    clock = member_clock(watch)
    clock.take_answer(ANN, clock.new_request(ANN), said)
    assert clock.offset_seconds == 0.0
    assert clock.is_due(ANN, 2.0)


def test_a_non_member_takes_the_members_time_and_keeps_it_as_a_member() -> None:
    watch = Watch()
    clock = SwarmClock(watch)
    clock.follow((ANN, BEN), is_source=False, takes_part=False)
    hear(clock, watch, ANN, -500.0)
    assert abs(clock.now() - (watch.now - 500.0)) < 1e-9, "all the way, and at once: nothing depends on its time yet"
    hear(clock, watch, BEN, -500.2)
    assert abs(clock.own() - (watch.now - 500.1)) < 1e-9
    clock.follow((ANN, BEN), is_source=True, takes_part=True)
    assert abs(clock.own() - (watch.now - 500.1)) < 1e-9, "as one source of three it says the swarm's time, not its own"
    clock.forget(ANN)
    clock.forget(BEN)
    watch.now += 10.0
    assert abs(clock.now() - (watch.now - 500.1)) < 1e-9, "left alone it goes on as it was"


def test_a_former_member_keeps_its_time() -> None:
    watch = Watch()
    clock = member_clock(watch, ANN)
    hear(clock, watch, ANN, 0.4)
    clock.follow((BEN,), is_source=False, takes_part=False)
    assert abs(ahead(clock, watch) - 0.2) < 1e-9


def test_time_that_is_ahead_slows_down_and_never_steps_back() -> None:
    watch = Watch()
    clock = member_clock(watch, takes_part=True)
    begin = clock.now()
    hear(clock, watch, ANN, -10.0, round_trip=0.0)
    hear(clock, watch, BEN, -10.0, round_trip=0.0)
    assert clock.now() == begin
    assert clock.own() == begin - 10.0, "others hear the right time at once"
    assert clock.disagreement_seconds == 10.0
    watch.now += 8.0
    assert abs(clock.now() - (begin + SLOWEST * 8.0)) < 1e-9
    watch.now += 12.0
    assert abs(ahead(clock, watch) + 10.0) < 1e-9, "10 s are made good in 20 s"
    assert clock.disagreement_seconds == 0.0
    before = clock.now()
    watch.now -= 3600.0
    assert clock.now() == before


def test_a_restarted_peer_is_not_settled_before_enough_peers_have_answered() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN, CLEO)
    assert not clock.is_settled
    hear(clock, watch, ANN, 600.0)
    assert not clock.is_settled, "one of four may lie"
    hear(clock, watch, BEN, 600.0)
    assert clock.is_settled
    assert abs(ahead(clock, watch) - 600.0) < 1e-9, "all the way: its own clock was no source"
    assert abs(clock.own() - clock.now()) < 1e-9


def test_one_liar_and_one_honest_member_do_not_mislead_a_restarted_peer() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN, CLEO)
    hear(clock, watch, ANN, 86_400.0)
    hear(clock, watch, BEN, 0.1)
    assert clock.is_settled
    assert abs(ahead(clock, watch)) < 0.2


def test_a_restarted_peer_takes_the_time_of_a_few_peers_after_a_while() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN, CLEO)
    hear(clock, watch, ANN, 600.0)
    watch.now += PATIENCE
    clock.poll()
    assert clock.is_settled
    assert abs(ahead(clock, watch) - 600.0) < 1e-9


def test_a_restarted_peer_without_answers_uses_its_saved_offset() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, offset=300.0)
    watch.now += PATIENCE - 1.0
    clock.poll()
    assert not clock.is_settled
    watch.now += 1.0
    clock.poll()
    assert clock.is_settled
    assert abs(ahead(clock, watch) - 300.0) < 1e-9
    assert abs(clock.wall_offset_seconds - 300.0) < 1e-9


def test_a_lone_peer_does_not_wait_and_its_time_is_not_before_its_latest_round() -> None:
    watch = Watch()
    clock = started_clock(watch, latest_round=100)
    assert clock.is_settled
    assert clock.now() == ROUNDS.begin(100)


@pytest.mark.parametrize("first", [ANN, BEN], ids=["ann first", "ben first"])
def test_restarted_members_agree_on_the_median_estimate_once_all_have_answered(
    first: PeerId,
) -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN)
    estimates = {ANN: -360.0, BEN: 5.0}
    for peer in sorted(estimates, key=lambda peer: peer != first):
        assert not clock.is_settled
        hear(clock, watch, peer, estimates[peer], is_settled=False)
    assert clock.is_settled
    assert abs(ahead(clock, watch)) < 1e-9, "the own estimate is the middle one of the three"
    assert clock.is_due(ANN, 2.0), "it will have another time soon"


def test_two_restarted_members_take_the_later_estimate() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN)
    hear(clock, watch, ANN, 40.0, is_settled=False)
    assert abs(ahead(clock, watch) - 40.0) < 1e-9


def test_a_majority_of_restarted_members_agrees_after_half_of_the_wait() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN)
    hear(clock, watch, ANN, 40.0, is_settled=False)
    assert not clock.is_settled, "somebody who has the time may be heard yet"
    watch.now += PATIENCE / 2
    clock.poll()
    assert abs(ahead(clock, watch) - 40.0) < 1e-9


def test_a_time_before_a_past_round_is_not_believed_unless_most_members_report_it() -> None:
    watch = Watch()
    clock = started_clock(watch, ANN, BEN, latest_round=ROUNDS.round_at(watch.now))
    hear(clock, watch, ANN, -3600.0)
    hear(clock, watch, BEN, 3.0, is_settled=False)
    assert abs(ahead(clock, watch)) < 3.1
    clock = started_clock(watch, ANN, BEN, latest_round=ROUNDS.round_at(watch.now))
    hear(clock, watch, ANN, -900.0)
    hear(clock, watch, BEN, -900.0)
    assert abs(ahead(clock, watch) + 900.0) < 1e-9


def test_when_two_clocks_differ_widely_the_one_behind_moves_after_a_while() -> None:
    watch, other = Watch(), Watch()
    one, two = started_clock(watch), started_clock(other)
    for clock in (one, two):
        clock.follow((ANN,), is_source=True, takes_part=True)
    for _ in range(20):
        hear(one, watch, ANN, 600.0)
        hear(two, other, ANN, -600.0)
        assert ahead(one, watch) == ahead(two, other) == 0.0
        assert one.is_due(ANN, 2.0), "who is far off is asked again at each heartbeat"
        assert abs(one.disagreement_seconds - 600.0) < 0.1
    watch.now += PATIENCE
    one.poll()
    assert abs(ahead(one, watch) - 600.0) < 1e-9
    assert abs(one.own() - one.now()) < 1e-9
    assert one.disagreement_seconds == 0.0
    hear(two, other, ANN, 0.0)
    assert ahead(two, other) == two.disagreement_seconds == 0.0


@pytest.mark.parametrize(("not_before", "goes_back"), [(1010.0, True), (1020.0, False)])
def test_a_peer_ahead_of_its_only_source_falls_back_after_twice_as_long(not_before: float, *, goes_back: bool) -> None:
    watch = Watch()
    clock = started_clock(watch)
    clock.follow((ANN,), is_source=True, takes_part=True, depends_on_hub=True)
    hear(clock, watch, ANN, -50.0)
    for passed in (PATIENCE - 1.0, PATIENCE - 1.0):
        watch.now += passed
        clock.poll(not_before)
        assert ahead(clock, watch) == 0.0, "others may take the time of this one"
    watch.now += 3.0
    clock.poll(not_before)
    assert abs(clock.own() - watch.now + (50.0 if goes_back else 0.0)) < 0.1
    watch.now += 200.0
    assert abs(ahead(clock, watch) + (50.0 if goes_back else 0.0)) < 0.1
    clock.follow((ANN,), is_source=True, takes_part=True, depends_on_hub=True)
    for _ in range(2):
        hear(clock, watch, ANN, 50.0)
        watch.now += PATIENCE
    clock.poll()
    assert abs(ahead(clock, watch) - 50.0) < 0.1, "who is behind goes forward as before"


@pytest.mark.parametrize("night", [28_800.0, 0.0], ids=["the steady clock stood still", "only the wall clock was set"])
def test_a_step_between_wall_and_steady_clock_starts_a_new_estimate(night: float) -> None:
    watch, wall = Watch(), Watch()
    clock = SwarmClock(watch, wall=wall)
    clock.begin(ROUNDS, latest_round=-1, patience_seconds=PATIENCE)
    clock.follow((), is_source=True, takes_part=True)
    clock.follow((ANN, BEN), is_source=True, takes_part=True)
    hear(clock, watch, ANN, 0.0)
    hear(clock, watch, BEN, 0.0)
    wall.now = watch.now + 28_800.0
    clock.poll()
    assert not clock.is_settled
    assert clock.is_due(ANN, 2.0)
    assert ahead(clock, watch) == 0.0, "time goes on meanwhile"
    hear(clock, watch, ANN, night)
    assert clock.is_settled
    assert abs(ahead(clock, watch) - night) < 1e-9


@pytest.mark.parametrize("num_peers", [2, 3, 4, 7])
def test_clocks_of_different_speed_stay_together_for_a_day(num_peers: int) -> None:
    """Clock speeds differ by +-100 ppm, and delays are longer in one direction, by up to 0.1 s."""
    random = Random(num_peers)
    speeds = [1.0 + 1e-4 * (2 * i / (num_peers - 1) - 1) for i in range(num_peers)]
    peers = [PeerId(sha256(b"%d" % i)) for i in range(num_peers)]
    true = Watch()
    true.now = 0.0
    clocks = [SwarmClock(lambda speed=speed: 1e6 + true.now * speed) for speed in speeds]
    delays = [[random.uniform(0.01, 0.11) for _ in peers] for _ in peers]
    for i, clock in enumerate(clocks):
        clock.begin(ROUNDS, latest_round=-1, patience_seconds=PATIENCE)
        clock.follow((), is_source=True, takes_part=True)
        clock.follow([peer for peer in peers if peer != peers[i]], is_source=True, takes_part=True)
    for _ in range(86_400 // 16):
        for i, clock in enumerate(clocks):
            for j, peer in enumerate(peers):
                if i != j:
                    begin, nonce = true.now, clock.new_request(peer)
                    true.now = begin + delays[i][j]
                    said = clocks[j].own()
                    true.now += delays[j][i]
                    clock.take_answer(peer, nonce, said)
                    true.now = begin
            clock.poll()
        true.now += 16.0
        shown = [clock.now() - 1e6 - true.now for clock in clocks]
        assert max(shown) - min(shown) < 0.3, "far within the tolerance of 2 s"
        assert all(clock.disagreement_seconds == 0.0 for clock in clocks)
        assert abs(sum(shown) / num_peers) < 0.05 + 40e-6 * true.now, "the mean speed is right, to within 40 ppm"


def test_the_clock_of_a_session_shows_unix_time_and_never_goes_back() -> None:
    raw = steady_unix_seconds()
    first = raw()
    assert first > 1.6e9
    assert raw() >= first


def test_a_log_that_was_given_up_keeps_no_clock_ahead() -> None:
    watch = Watch()
    clock = started_clock(watch)
    clock.follow((ANN,), is_source=True, takes_part=True, depends_on_hub=True)
    clock.poll(1000.0)
    hear(clock, watch, ANN, -600.0)
    for _ in range(4):
        watch.now += PATIENCE
        clock.poll(200.0)  # the log was given up for another one
    assert abs(clock.own() - watch.now + 600.0) < 1.0
