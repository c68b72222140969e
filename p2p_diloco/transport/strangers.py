"""Limits for peers that are not members. This module is pure: its classes are state machines, times are loop time.

Anyone with an address can open streams and send requests to the directory, sign records with any number of identities
and put any address into them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.transport.addresses import is_loopback
from p2p_diloco.transport.rate_limit import Buckets, Rate, TokenBucket, spend_if_all

Stream = TypeVar("Stream")


MOST_OF_ONE = 8
"""Maximum ungreeted streams of one peer. A dial opens two; an earlier dial of the same peer may still be here."""
MOST_OF_MEMBER = 16
MOST_IN_ALL = 128
"""Maximum ungreeted streams of all peers that are not members."""
BORNE_AT_ONCE, BORNE_PER_SECOND = 32.0, 1.0
"""Streams, and refused requests, of one peer that is not a member before its connection is closed. A dial opens two.

After this machine has slept, many streams of honest peers that dialled again and again arrive at once.
"""
MOST_LINKS = 64
"""Maximum links of strangers that a peer keeps."""
DIALS_PER_SECOND, DIALS_AT_ONCE = 0.5, 32.0
"""Limit for all strangers together. They can also dial us, and members are not limited by this."""
DIALS_PER_PLACE, PLACE_SECONDS = 4.0, 600.0
"""Maximum dials to one place within this time, whoever names it."""
_SITE_BITS = {4: 32, 6: 64}

STRANGER_CALLS, STRANGERS_CALLS, MEMBER_CALLS = Rate(2.0, 60.0), Rate(20.0, 400.0), Rate(20.0, 400.0)
"""Requests of one stranger, of all together, and of one member. A newcomer looks up all keys once a second at first."""
STRANGER_RECORDS, STRANGERS_RECORDS, MEMBER_RECORDS = Rate(0.2, 16.0), Rate(4.0, 512.0), Rate(20.0, 2048.0)
"""Records that peers may store here. Each announces its own every two minutes; members also hand over others'."""
BYTES_OF_A_RECORD = 256
"""Length from which a request counts as several records, before it is parsed."""
BYTES_OF_A_CALL = 65536
"""Length from which an answer counts as several requests."""
MOST_REQUEST_BYTES, MOST_ANSWER_BYTES = 262_144, 2_097_152
"""Maximum lengths of a request and of an answer, asked before they are parsed. Honest ones hold a few shards."""
MOST_VALUES = 512
"""Maximum entries in a request to store."""
MOST_NODES = 2048
"""Number of nodes in the table of neighbours from which on strangers are not added to it."""
MOST_KEYS = 16
"""Maximum keys in one request: all shards of a run."""
MOST_NEIGHBOURS = 20
"""Maximum neighbours that an answer names for each key: hivemind's size of a bucket."""
MOST_STRANGERS = 64
"""Maximum records of peers that are not members in one shard of the store, and in one that was read."""
MOST_IN_SHARD = 512
"""Maximum records of one shard."""
MOST_NEW = 8
"""Maximum records of strangers in one answer whose signatures are checked: each takes 0.1 ms."""


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

    @property
    def num_places(self) -> int:
        """Number of places whose dials are counted."""
        return len(self._places)

    def admits(self, addresses: Sequence[str], now: float) -> bool:
        """Return whether a peer may be dialled at these multiaddrs now; count the dial if so."""
        named = dict.fromkeys(place_of(address.split("/")[2]) for address in addresses if _names_place(address))
        rate = Rate(DIALS_PER_PLACE / PLACE_SECONDS, DIALS_PER_PLACE)
        places = [self._places.get(place, now, rate) for place in named]
        buckets = [self._all, *(bucket for bucket in places if bucket is not None)]
        return len(buckets) > len(places) and spend_if_all(buckets, now)


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


class Answer(NamedTuple, Generic[Stream]):
    """The answer to a stream.

    Attributes:
        is_greeted: whether to greet it; otherwise it is closed.
        dropped: an earlier stream that must be closed to make room for this one.
    """

    is_greeted: bool
    dropped: Stream | None = None


class Callers(Generic[Stream]):
    """The ungreeted streams by peer.

    If strangers have too many, the oldest stream of the peer with the most is dropped, so that a newcomer that greets
    at once always gets in.
    """

    def __init__(self) -> None:
        self._waiting: dict[PeerId, deque[Stream]] = {}
        self._members: set[PeerId] = set()
        self._borne: Buckets[PeerId] = Buckets()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def called(self, peer: PeerId, stream: Stream, now: float, *, is_member: bool) -> Answer[Stream]:
        """Judge a new stream of `peer`; it counts until `ended` is called for it, if it is to be greeted."""
        (self._members.add if is_member else self._members.discard)(peer)
        if len(self._waiting.get(peer, ())) >= (MOST_OF_MEMBER if is_member else MOST_OF_ONE):
            return Answer(is_greeted=False)
        self._waiting.setdefault(peer, deque()).append(stream)
        strangers = {each: streams for each, streams in self._waiting.items() if each not in self._members}
        if is_member or sum(map(len, strangers.values())) <= MOST_IN_ALL:
            return Answer(is_greeted=True)
        busiest = max(strangers, key=lambda each: (len(strangers[each]), each != peer))
        dropped = strangers[busiest][0]
        self.ended(busiest, dropped)
        return Answer(is_greeted=True, dropped=dropped)

    def ended(self, peer: PeerId, stream: Stream) -> None:
        waiting = self._waiting.get(peer)
        if waiting is not None and stream in waiting:
            waiting.remove(stream)
            if not waiting:
                del self._waiting[peer]
                self._members.discard(peer)

    def has_patience_with(self, peer: PeerId, now: float) -> bool:
        """Count a stream or a refused request of `peer`; return whether to bear it."""
        bucket = self._borne.get(peer, now, Rate(BORNE_PER_SECOND, BORNE_AT_ONCE))
        return bucket is not None and bucket.admits(now)


class CallBudgets:
    """Admits the requests of other peers up to a budget.

    Args:
        is_member: returns whether a peer is a member of the run.
    """

    def __init__(self, is_member: Callable[[PeerId], bool]) -> None:
        self._is_member = is_member
        self._calls: Buckets[PeerId] = Buckets()
        self._records: Buckets[PeerId] = Buckets()
        self._of_strangers = {rate: TokenBucket(**rate._asdict()) for rate in (STRANGERS_CALLS, STRANGERS_RECORDS)}

    def admits_call(self, peer: PeerId, now: float) -> bool:
        """Return whether to read a request of `peer`; count it if so."""
        if self._is_member(peer):
            return self._admits(self._calls, peer, MEMBER_CALLS, 1.0, now)
        return self._admits(self._calls, peer, STRANGER_CALLS, 1.0, now, self._of_strangers[STRANGERS_CALLS])

    def admits_record(self, peer: PeerId, num_bytes: int, now: float) -> bool:
        """Return whether to parse and store what `peer` sends; count it by its length if so."""
        amount = max(1.0, num_bytes / BYTES_OF_A_RECORD)
        if self._is_member(peer):
            return self._admits(self._records, peer, MEMBER_RECORDS, amount, now)
        shared = self._of_strangers[STRANGERS_RECORDS]
        return self._admits(self._records, peer, STRANGER_RECORDS, amount, now, shared)

    def charge(self, peer: PeerId, num_bytes: int, now: float) -> None:
        """Count the bytes of an answer, as requests."""
        is_member, amount = self._is_member(peer), num_bytes / BYTES_OF_A_CALL
        own = self._calls.get(peer, now, MEMBER_CALLS if is_member else STRANGER_CALLS)
        for bucket in (own, None if is_member else self._of_strangers[STRANGERS_CALLS]):
            if bucket is not None:
                bucket.spend(amount, now)

    def is_used_up(self, peer: PeerId, now: float) -> bool:
        """Return whether `peer` itself sends too much, and not only all strangers together."""
        rates = (MEMBER_CALLS, MEMBER_RECORDS) if self._is_member(peer) else (STRANGER_CALLS, STRANGER_RECORDS)
        for buckets, rate in zip((self._calls, self._records), rates, strict=True):
            bucket = buckets.get(peer, now, rate)
            if bucket is None or not bucket.has_one(now):
                return True
        return False

    def _admits(
        self, buckets: Buckets[PeerId], peer: PeerId, rate: Rate, amount: float, now: float, *shared: TokenBucket
    ) -> bool:
        own = buckets.get(peer, now, rate)
        if own is None or amount > rate.burst or not own.has_one(now):
            return False
        own.spend(amount, now)  # also if all together send too much, or who floods would not be noticed then
        return spend_if_all(shared, now, amount)


def choose_peers(
    peers: Iterable[bytes], *, is_member: Callable[[PeerId], bool], most_strangers: int, draw: bytes
) -> set[bytes]:
    """Return which records of a shard to keep: those of members, and a sample of the others.

    Args:
        draw: new random bytes for each choice, so that an attacker cannot create ids that are always chosen, and a peer
            that was omitted once may be chosen the next time.
    """
    order = sorted(peers, key=lambda peer: sha256(draw, peer))
    members = [peer for peer in order if is_member(PeerId(peer))][:MOST_IN_SHARD]
    strangers = [peer for peer in order if not is_member(PeerId(peer))]
    return {*members, *strangers[: min(most_strangers, MOST_IN_SHARD - len(members))]}
