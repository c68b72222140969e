"""Bounds on what others can make this peer's directory do: budgets for their requests, and a choice of their records.

Anyone with an address can send requests to the DHT, and identities cost nothing. This module is pure: the directory
uses it at its border to hivemind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, parse_peer_id, sha256
from p2p_diloco.transport.directory import MAX_ADDRESS_BYTES, MAX_ADDRESSES
from p2p_diloco.transport.protobuf import encode_field, fields_of
from p2p_diloco.transport.rate_limit import Buckets, TokenBucket


class Rate(NamedTuple):
    """A rate per second, and a burst after a pause."""

    per_second: float
    burst: float


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
MOST_ADDRESSES_TOLD = 64
"""Maximum addresses in one answer."""
ADDRESSES_FIELD = 100
"""Number of the field, which hivemind's messages do not have."""


class CallBudgets:
    """Admits the requests of other peers up to a budget. A state machine; times are loop time.

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
        own = self._calls.get(peer, now, **(MEMBER_CALLS if is_member else STRANGER_CALLS)._asdict())
        for bucket in (own, None if is_member else self._of_strangers[STRANGERS_CALLS]):
            if bucket is not None:
                bucket.spend(amount, now)

    def is_used_up(self, peer: PeerId, now: float) -> bool:
        """Return whether `peer` itself sends too much, and not only all strangers together."""
        rates = (MEMBER_CALLS, MEMBER_RECORDS) if self._is_member(peer) else (STRANGER_CALLS, STRANGER_RECORDS)
        for buckets, rate in zip((self._calls, self._records), rates, strict=True):
            bucket = buckets.get(peer, now, **rate._asdict())
            if bucket is None or not bucket.has_one(now):
                return True
        return False

    def _admits(
        self, buckets: Buckets[PeerId], peer: PeerId, rate: Rate, amount: float, now: float, *shared: TokenBucket
    ) -> bool:
        own = buckets.get(peer, now, **rate._asdict())
        if own is None or amount > rate.burst or not own.has_one(now):
            return False
        own.spend(amount, now)  # also if all together send too much, or who floods would not be noticed then
        if not all(bucket.has_one(now) for bucket in shared):
            return False
        for bucket in shared:
            bucket.spend(amount, now)
        return True


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


# -- the addresses of the peers that an answer names


def encode_addresses(addresses: Iterable[str]) -> bytes:
    """Return full multiaddrs as a field that hivemind's answers do not have; nothing if there are none.

    hivemind names neighbours by their ids alone, and would find their addresses in a second DHT, of the libp2p daemon,
    in which strangers can store without bounds.
    """
    text = "\n".join(islice(addresses, MOST_ADDRESSES_TOLD)).encode("ascii", "ignore")
    return encode_field(ADDRESSES_FIELD, text) if text else b""


def decode_addresses(answer: bytes) -> dict[PeerId, tuple[str, ...]]:
    """Return the addresses by peer in an encoded answer; they must be checked before they are dialled."""
    try:
        value = fields_of(answer).get(ADDRESSES_FIELD, b"")
    except ValueError:  # answers to other questions have fields without a length
        return {}
    found: dict[PeerId, tuple[str, ...]] = {}
    for line in value[: MOST_ADDRESSES_TOLD * (MAX_ADDRESS_BYTES + 1)].split(b"\n")[:MOST_ADDRESSES_TOLD]:
        address = line.decode("ascii", "replace")
        try:
            peer = parse_peer_id(address.rpartition("/p2p/")[2])
        except ConfigError:
            continue
        if len(found.get(peer, ())) < MAX_ADDRESSES:
            found[peer] = (*found.get(peer, ()), address)
    return found
