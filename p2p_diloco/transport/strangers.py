"""Limits for peers that are not members: dials to addresses that they name, and links. This module is pure.

Anyone can sign records with any number of identities and put any address into them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.addresses import is_loopback
from p2p_diloco.transport.rate_limit import Buckets, TokenBucket

MOST_LINKS = 64
DIALS_PER_SECOND, DIALS_AT_ONCE = 0.5, 32.0
"""Limit for all strangers together. They can also dial us, and members are not limited by this."""
DIALS_PER_PLACE, PLACE_SECONDS = 4.0, 600.0
"""Maximum dials to one place within this time, whoever names it."""
_SITE_BITS = {4: 32, 6: 64}


def place_of(host: str) -> str:
    """Return the place of a host: an IPv4 address, the /64 of an IPv6 address, or the name itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower()
    return str(ipaddress.ip_network((address, _SITE_BITS[address.version]), strict=False))


class DialBudget:
    """Limits dials to places that strangers name; loopback does not count as a place. A state machine."""

    def __init__(self) -> None:
        self._all = TokenBucket(per_second=DIALS_PER_SECOND, burst=DIALS_AT_ONCE)
        self._places: Buckets[str] = Buckets()

    def admits(self, addresses: Sequence[str], now: float) -> bool:
        """Return whether a peer may be dialled at these multiaddrs now; count the dial if so."""
        named = dict.fromkeys(place_of(address.split("/")[2]) for address in addresses if _names_place(address))
        rate = DIALS_PER_PLACE / PLACE_SECONDS
        places = [self._places.get(place, now, per_second=rate, burst=DIALS_PER_PLACE) for place in named]
        buckets = [self._all, *(bucket for bucket in places if bucket is not None)]
        if len(buckets) <= len(places):
            return False
        if not all(bucket.has_one(now) for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.spend(1.0, now)
        return True


def _names_place(address: str) -> bool:
    return address.count("/") >= 2 and not is_loopback(address)


def surplus_links(strangers: Iterable[PeerId], hosts: Mapping[PeerId, Sequence[str]], most: int) -> list[PeerId]:
    """Return the peers whose links to close so that `most` are left: repeatedly the newest of the busiest place.

    Args:
        strangers: linked strangers, in order of arrival.
        hosts: their hosts as seen here. Peers on loopback, or without a known host, are not counted.
    """
    came: dict[str, list[PeerId]] = {}
    for peer in strangers:
        seen = [host for host in hosts.get(peer, ()) if not _is_loopback_host(host)]
        if seen:
            came.setdefault(place_of(seen[0]), []).append(peer)
    left, closed = Counter({place: len(peers) for place, peers in came.items()}), []
    for _ in range(left.total() - most):
        busiest = max(left, key=lambda place: (left[place], place))
        left[busiest] -= 1
        closed.append(came[busiest].pop())
    return closed


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
