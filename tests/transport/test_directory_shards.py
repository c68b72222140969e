"""Places of records in the DHT, and which records are accepted there."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.signing import SigningKey
from p2p_diloco.transport.directory import (
    MAX_LIFETIME_SECONDS,
    SHARDS,
    PeerRole,
    directory_key,
    directory_keys,
    is_acceptable,
    shard_of,
    sign_record,
)

RUN = sha256(b"the run")
KEY = SigningKey(sha256(b"key"))
OTHER = SigningKey(sha256(b"other"))
ISSUED_AT = 1000.0
RECORD = sign_record(KEY, run=RUN, addresses=(), can_be_dialled=False, role=PeerRole.LISTENER, issued_at=ISSUED_AT)
SHARD = shard_of(KEY.peer)
SUBKEY = msgpack.packb(KEY.peer)
VALUE = msgpack.packb(RECORD.encode())
CROWD = [sha256(b"peer %d" % number) for number in range(1024)]


def place(run: bytes, shard: int) -> bytes:
    return hashlib.sha1(directory_key(sha256(run) if run != RUN else RUN, shard)).digest()


PLACE = place(RUN, SHARD)


# -- shards


def test_a_thousand_peers_are_spread_evenly() -> None:
    filled = Counter(shard_of(PeerId(peer)) for peer in CROWD)
    assert filled.keys() == set(range(SHARDS))
    assert max(filled.values()) < 1.5 * len(CROWD) / SHARDS
    assert min(filled.values()) > 0.5 * len(CROWD) / SHARDS


def test_the_shard_of_a_peer_never_changes() -> None:
    assert [shard_of(PeerId(bytes([byte]) * 32)) for byte in range(8)] == [8, 8, 15, 5, 2, 10, 12, 5]


@given(st.binary(min_size=32, max_size=32))
def test_every_peer_has_a_shard_that_readers_look_up(peer: bytes) -> None:
    assert directory_key(RUN, shard_of(PeerId(peer))) in directory_keys(RUN)


def test_no_two_shards_or_runs_share_a_key() -> None:
    keys = (*directory_keys(RUN), *directory_keys(sha256(b"other run")))
    assert len(set(keys)) == 2 * SHARDS


# -- how much of a shard is read


# -- what is accepted


def test_a_signed_record_in_its_place_is_accepted() -> None:
    assert is_acceptable(RUN, PLACE, SUBKEY, VALUE, ISSUED_AT + 600, ISSUED_AT)


@pytest.mark.parametrize("shard", sorted(set(range(SHARDS)) - {SHARD}))
def test_a_record_in_another_shard_is_refused(shard: int) -> None:
    assert not is_acceptable(RUN, place(RUN, shard), SUBKEY, VALUE, ISSUED_AT + 600, ISSUED_AT)


@pytest.mark.parametrize(
    ("where", "subkey", "value", "expires_at"),
    [
        (place(b"other run", SHARD), SUBKEY, VALUE, ISSUED_AT),
        (hashlib.sha1(directory_key(RUN, SHARD)[:-1]).digest(), SUBKEY, VALUE, ISSUED_AT),
        (PLACE, msgpack.packb(OTHER.peer), VALUE, ISSUED_AT),
        (PLACE, b"", VALUE, ISSUED_AT),
        (PLACE, b"\xc5\x00\x20" + RECORD.peer, VALUE, ISSUED_AT),  # the same id, packed in another way
        (PLACE, msgpack.packb(None), VALUE, ISSUED_AT),
        (PLACE, SUBKEY, VALUE[:-1], ISSUED_AT),
        (PLACE, SUBKEY, VALUE + b"\x00", ISSUED_AT),
        (PLACE, SUBKEY, msgpack.packb(bytes(200)), ISSUED_AT),
        (PLACE, SUBKEY, msgpack.packb([RECORD.encode()]), ISSUED_AT),
        (PLACE, SUBKEY, b"\x91" * 300, ISSUED_AT),
        (PLACE, SUBKEY, b"", ISSUED_AT),
        (PLACE, SUBKEY, VALUE, ISSUED_AT + MAX_LIFETIME_SECONDS + 1),
        (PLACE, SUBKEY, VALUE, float("inf")),
        (PLACE, SUBKEY, VALUE, float("nan")),
        (PLACE, SUBKEY, VALUE, "tomorrow"),
        (PLACE, SUBKEY, None, ISSUED_AT),
        (PLACE, SUBKEY, 7, ISSUED_AT),
    ],
)
def test_anything_else_is_refused(where: bytes, subkey: bytes, value: bytes, expires_at: float) -> None:
    assert not is_acceptable(RUN, where, subkey, value, expires_at, ISSUED_AT)


@pytest.mark.parametrize(("ahead", "is_taken"), [(-60.0, True), (600.0, True), (3600.0, True), (3601.0, False)])
def test_a_record_of_the_future_is_refused(ahead: float, is_taken: bool) -> None:
    assert is_acceptable(RUN, PLACE, SUBKEY, VALUE, ISSUED_AT + 600, ISSUED_AT - ahead) == is_taken
