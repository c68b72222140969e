"""Limits on the cost of peers that are not members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.transport.rate_limit import MOST_BUCKETS
from p2p_diloco.transport.strangers import (
    DIALS_AT_ONCE,
    DIALS_PER_PLACE,
    PLACE_SECONDS,
    DialBudget,
    place_of,
    surplus_links,
)


def peers(count: int, name: bytes = b"peer") -> list[PeerId]:
    return [PeerId(sha256(name, b"%d" % number)) for number in range(count)]


def num_dials(budget: DialBudget, addresses: list[str], *, seconds: int = 3600) -> int:
    """Return the number of dials made if one of these is requested every second."""
    return sum(budget.admits((addresses[second % len(addresses)],), float(second)) for second in range(seconds))


@pytest.mark.parametrize(
    "addresses",
    [
        ["/ip4/203.0.113.5/tcp/22/p2p/x"],
        [f"/ip4/203.0.113.5/tcp/{port}/p2p/x" for port in range(1, 1000)],
        [f"/ip6/2001:db8::{number:x}/tcp/22/p2p/x" for number in range(1, 1000)],
        ["/dns4/victim.example/tcp/22/p2p/x", "/dns4/VICTIM.example/tcp/22/p2p/x"],
    ],
    ids=["one", "ports", "a /64", "a name"],
)
def test_one_place_is_dialled_a_few_times_in_ten_minutes_whoever_names_it(addresses: list[str]) -> None:
    assert num_dials(DialBudget(), addresses) <= DIALS_PER_PLACE * (1 + 3600 / PLACE_SECONDS)


def test_a_record_with_several_places_is_counted_for_each() -> None:
    budget = DialBudget()
    for number in range(int(DIALS_PER_PLACE)):
        assert budget.admits((f"/ip4/198.51.100.{number}/tcp/1", "/ip4/203.0.113.5/tcp/22"), 0.0)
    assert not budget.admits(("/ip4/198.51.100.99/tcp/1", "/ip4/203.0.113.5/tcp/22"), 0.0)
    assert budget.admits(("/ip4/198.51.100.99/tcp/1",), 0.0)


def test_all_strangers_together_get_a_few_dozen_dials_and_one_every_other_second() -> None:
    places = [f"/ip4/198.18.{number // 250}.{number % 250}/tcp/1" for number in range(10_000)]
    assert DIALS_AT_ONCE <= num_dials(DialBudget(), places, seconds=600) <= DIALS_AT_ONCE + 300


def test_loopback_is_not_a_place_and_an_invalid_address_costs_only_a_dial() -> None:
    budget = DialBudget()
    for address in ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1", "nonsense"):
        assert all(budget.admits((address,), 0.0) for _ in range(8))


def test_places_take_bounded_memory() -> None:
    budget = DialBudget()
    for number in range(3 * MOST_BUCKETS):
        budget.admits((f"/dns4/{number}.example/tcp/1",), 2.0 * number)
        assert budget.num_places <= MOST_BUCKETS
    budget.admits(tuple(f"/dns4/{number}.test/tcp/1" for number in range(MOST_BUCKETS + 1)), 1e6)
    assert budget.num_places <= MOST_BUCKETS


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("203.0.113.5", "203.0.113.5/32"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("Some.Name", "some.name"),
    ],
)
def test_a_place_is_an_ipv4_address_an_ipv6_64_or_a_name(host: str, place: str) -> None:
    assert place_of(host) == place


# -- links


def test_the_newest_links_of_the_busiest_address_are_closed() -> None:
    crowd, few, home = peers(70, b"crowd"), peers(3, b"few"), peers(20, b"home")
    hosts = {
        **dict.fromkeys(crowd, ("203.0.113.5",)),
        **dict.fromkeys(few, ("198.51.100.7",)),
        **dict.fromkeys(home, ("127.0.0.1",)),
    }
    came = [*crowd[:60], *few, *home, *crowd[60:]]
    assert surplus_links(came, hosts, 64) == list(reversed(crowd[61:]))
    assert surplus_links([*crowd[:60], *few], hosts, 64) == []


def test_links_from_loopback_or_unknown_places_are_kept() -> None:
    everybody = peers(100)
    assert surplus_links(everybody, dict.fromkeys(everybody, ("::1",)), 64) == []
    assert surplus_links(everybody, {}, 64) == []
    assert surplus_links(everybody, dict.fromkeys(everybody, ("a name",)), 64) == list(reversed(everybody[64:]))


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 20))
def test_only_as_many_links_as_necessary_are_closed_and_none_of_a_quieter_place(places: list[int], most: int) -> None:
    everybody = peers(len(places))
    hosts = {peer: (f"198.51.100.{place}",) for peer, place in zip(everybody, places, strict=True)}
    closed = surplus_links(everybody, hosts, most)
    left = [peer for peer in everybody if peer not in closed]
    assert len(left) == min(len(everybody), most)
    count = {host: sum(hosts[peer][0] == host for peer in left) for (host,) in hosts.values()}
    assert all(count[hosts[peer][0]] >= max(count.values()) - 1 for peer in closed)
