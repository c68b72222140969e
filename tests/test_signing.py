"""A signature is checked with the key that is the peer's id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId
from p2p_diloco.signing import PRIVATE_KEY_BYTES, SIGNATURE_BYTES, SigningKey, is_signed_by

# RFC 8032, section 7.1, test 1.
SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
    "655141438e7a100b"
)


def test_keys_and_signatures_match_rfc_8032() -> None:
    key = SigningKey(SECRET)
    assert key.peer == PUBLIC
    assert key.sign(b"") == SIGNATURE
    assert key.private_bytes() == SECRET


@given(st.binary(min_size=PRIVATE_KEY_BYTES, max_size=PRIVATE_KEY_BYTES), st.binary(max_size=200))
def test_a_signature_is_valid_only_for_its_peer_and_statement(secret: bytes, statement: bytes) -> None:
    key = SigningKey(secret)
    signature = key.sign(statement)
    assert len(signature) == SIGNATURE_BYTES
    assert key.sign(statement) == signature
    assert is_signed_by(key.peer, statement, signature)
    assert not is_signed_by(key.peer, statement + b"!", signature)


def test_a_signature_of_another_peer_is_refused() -> None:
    statement = b"roster 7"
    assert not is_signed_by(SigningKey(bytes(32)).peer, statement, SigningKey(SECRET).sign(statement))


@pytest.mark.parametrize("signature", [b"", SIGNATURE[:-1], SIGNATURE + b"\0", bytes(SIGNATURE_BYTES)])
def test_a_malformed_signature_is_invalid_without_an_error(signature: bytes) -> None:
    assert not is_signed_by(PeerId(PUBLIC), b"", signature)


@pytest.mark.parametrize("peer", [b"", b"short", bytes(33)])
def test_a_malformed_peer_is_invalid_without_an_error(peer: bytes) -> None:
    assert not is_signed_by(PeerId(peer), b"", SIGNATURE)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_private_key_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32"):
        SigningKey(bytes(size))
