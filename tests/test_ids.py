"""Peers, digests and spans have the same names everywhere."""

from __future__ import annotations

import hashlib

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import (
    DIGEST_BYTES,
    PEER_ID_BYTES,
    ZERO_DIGEST,
    PeerId,
    SpanId,
    blake3_of,
    format_peer_id,
    parse_peer_id,
    sha256,
    short_peer_id,
)
from p2p_diloco.span_log import SpanHead

# The Ed25519 public key of the libp2p peer-id specification, wrapped by hand: multihash 00 24 of protobuf 08 01 12 20.
KEY = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
KEY_AS_TEXT = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@given(st.binary(min_size=PEER_ID_BYTES, max_size=PEER_ID_BYTES))
def test_a_peer_id_survives_its_text_form(key: bytes) -> None:
    text = format_peer_id(PeerId(key))
    assert text.startswith("12D3KooW")
    assert parse_peer_id(text) == key


def test_the_text_form_is_that_of_libp2p() -> None:
    text = format_peer_id(PeerId(KEY))
    assert base58.b58decode(text) == bytes.fromhex("002408011220") + KEY
    assert text == KEY_AS_TEXT


def test_the_short_form_shows_both_ends() -> None:
    text = format_peer_id(PeerId(KEY))
    assert short_peer_id(PeerId(KEY)) == f"12D3..{text[-8:]}"


@pytest.mark.parametrize("text", ["", "0OIl", "not a peer", "héllo"])
def test_text_that_is_not_base58_is_not_a_peer_id(text: str) -> None:
    with pytest.raises(ConfigError, match="12D3KooW"):
        parse_peer_id(text)


def test_the_id_of_an_rsa_peer_is_refused() -> None:
    rsa = base58.b58encode(bytes([0x12, 0x20]) + bytes(32)).decode()
    with pytest.raises(ConfigError, match="not the id of an Ed25519 peer"):
        parse_peer_id(rsa)


def test_an_id_that_is_one_byte_too_long_is_refused() -> None:
    long = base58.b58encode(bytes.fromhex("002408011220") + bytes(33)).decode()
    with pytest.raises(ConfigError, match="not the id of an Ed25519 peer"):
        parse_peer_id(long)


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_sha256_hashes_the_concatenation(parts: list[bytes]) -> None:
    assert sha256(*parts) == hashlib.sha256(b"".join(parts)).digest()
    assert sha256(*map(memoryview, parts)) == sha256(*parts)


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_blake3_hashes_the_concatenation(parts: list[bytes]) -> None:
    assert blake3_of(*parts) == blake3_of(b"".join(parts)) == blake3_of(*map(memoryview, parts))


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (31744, "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47"),
    ],
)
def test_blake3_matches_the_published_vectors(length: int, digest: str) -> None:
    # Source: test_vectors.json of the BLAKE3 reference implementation; inputs repeat the bytes 0 to 250.
    assert blake3_of(bytes(place % 251 for place in range(length))).hex() == digest


def test_the_zero_digest_has_the_length_of_a_digest() -> None:
    assert len(ZERO_DIGEST) == DIGEST_BYTES == len(sha256())


def test_spans_sort_by_fragment_and_then_by_index() -> None:
    spans = [SpanId(1, 0), SpanId(0, 2), SpanId(0, 1)]
    assert sorted(spans) == [SpanId(0, 1), SpanId(0, 2), SpanId(1, 0)]
    assert str(SpanId(2, 7)) == "fragment 2 span 7"


def test_heads_are_equal_by_value() -> None:
    def head(height: int) -> SpanHead:
        return SpanHead(digest=ZERO_DIGEST, height=height, round=3, roster=ZERO_DIGEST, radius=0.5, median_weight=2.0)

    assert head(1) == head(1)
    assert head(1) != head(2)
