"""What the DHT accepts. That it works among real daemons is shown in tests/swarm."""

from __future__ import annotations

import hashlib

import msgpack
import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import format_peer_id, sha256
from p2p_diloco.signing import SigningKey
from p2p_diloco.transport.directory import MAX_LIFETIME_SECONDS, PeerRole, sign_record
from p2p_diloco.transport.libp2p_directory import _group_by_peer, directory_key, is_acceptable

RUN = sha256(b"the run")
KEY = SigningKey(sha256(b"key"))
OTHER = SigningKey(sha256(b"other"))
ISSUED_AT = 1000.0
RECORD = sign_record(KEY, run=RUN, addresses=(), can_be_dialled=False, role=PeerRole.LISTENER, issued_at=ISSUED_AT)
PLACE = hashlib.sha1(directory_key(RUN)).digest()
SUBKEY = msgpack.packb(KEY.peer)
VALUE = msgpack.packb(RECORD.encode())


def test_a_signed_record_in_its_place_is_accepted() -> None:
    assert is_acceptable(PLACE, SUBKEY, VALUE, ISSUED_AT + 600)


@pytest.mark.parametrize(
    ("place", "subkey", "value", "expires_at"),
    [
        (hashlib.sha1(directory_key(sha256(b"other run"))).digest(), SUBKEY, VALUE, ISSUED_AT),
        (PLACE, msgpack.packb(OTHER.peer), VALUE, ISSUED_AT),
        (PLACE, b"", VALUE, ISSUED_AT),
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
def test_anything_else_is_not(place: bytes, subkey: bytes, value: bytes, expires_at: float) -> None:
    assert not is_acceptable(place, subkey, value, expires_at)


def test_initial_peers_are_gathered_by_peer_without_oneself() -> None:
    one, own = (f"/ip4/127.0.0.1/tcp/{{}}/p2p/{format_peer_id(key.peer)}" for key in (KEY, OTHER))
    addresses = [one.format(1), own.format(2), one.format(3)]
    assert _group_by_peer(addresses, own=OTHER.peer) == {KEY.peer: (addresses[0], addresses[2])}


def test_an_initial_peer_without_its_id_is_an_error_of_configuration() -> None:
    with pytest.raises(ConfigError, match="of a bootstrap peer lacks /p2p/<peer id>"):
        _group_by_peer(["/ip4/127.0.0.1/tcp/1"], own=OTHER.peer)
