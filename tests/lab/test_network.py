"""Links, lanes, walls and weather."""

from __future__ import annotations

import random

from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.network import Network, Weather, pair_of

A, B = (Machine(name=name, dialable=name == "a", trains=True) for name in "ab")


def connected(weather: Weather | None = None) -> Network:
    network = Network(random.Random(1))
    network.weather = weather if weather is not None else Weather()
    network.connect(A, B)
    return network


def test_within_a_lane_order_is_kept_and_between_lanes_it_is_not() -> None:
    network = connected(Weather(slow_share=0.5, slow_seconds=5.0))
    half = A.links[B.peer]
    control = [network.arrivals(half, at, False)[0] for at in range(20)]
    assert control == sorted(control)
    assert network.arrivals(half, 1.0, True)[0] < control[-1]


def test_messages_are_lost_doubled_and_muted() -> None:
    network = connected(Weather(loss=1.0))
    half = A.links[B.peer]
    assert network.arrivals(half, 0.0, False) == []
    network.weather = Weather(duplication=1.0)
    assert len(network.arrivals(half, 0.0, False)) == 2
    network.muted = frozenset({("a", "b")})
    assert network.arrivals(half, 0.0, False) == []
    assert len(network.arrivals(B.links[A.peer], 0.0, False)) == 2


def test_a_broken_link_stands_until_both_ends_have_heard() -> None:
    network = connected()
    pair = pair_of(B, A)
    link = network.break_link(pair)
    assert link is not None
    assert not link.is_up
    assert A.links == B.links == {}
    assert network.break_link(pair) is None
    assert network.links_of(A) == [pair]
    assert not network.told(pair, "a")
    assert network.told(pair, "b")
    assert network.links == {}


def test_a_wall_cuts_links_between_its_sides_only() -> None:
    network = connected()
    assert network.separate(["a", "b"]) == []
    assert network.separate(["a"], ["b"]) == [("a", "b")]
    assert network.is_walled(A, B)
    assert not network.can_meet(A, B)
