"""Identifiers shared by all packages: peers, digests and spans.

A peer is identified by its Ed25519 public key. libp2p's textual peer id is an encoding of those 32 bytes, so the same
value is used on the wire, for signatures and in texts.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple, NewType

import base58
from blake3 import blake3

from p2p_diloco.errors import ConfigError

PeerId = NewType("PeerId", bytes)
"""32-byte Ed25519 public key of a peer."""

Digest = NewType("Digest", bytes)
"""32-byte SHA-256."""

PEER_ID_BYTES = 32
DIGEST_BYTES = 32
ZERO_DIGEST = Digest(bytes(DIGEST_BYTES))

# Multihash "identity", 36 bytes: protobuf {type: Ed25519, data: 32 bytes}. Source: libp2p specs, peer-ids.
_LIBP2P_ED25519_PREFIX = bytes.fromhex("002408011220")


class SpanId(NamedTuple):
    """Identifies a span: the fragment's index in the run and the span's index in the fragment."""

    fragment: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used for spans

    def __str__(self) -> str:
        return f"fragment {self.fragment} span {self.index}"


def sha256(*parts: bytes | memoryview) -> Digest:
    """Hash the concatenation of `parts` with SHA-256: for short inputs, and for what users may check themselves."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return Digest(hasher.digest())


def blake3_of(*parts: bytes | memoryview) -> Digest:
    """Hash the concatenation of `parts` with BLAKE3: for vectors, encoded or not.

    As strong as SHA-256 and, on long inputs, several times as fast even on processors with SHA instructions.
    Source: BLAKE3, https://github.com/BLAKE3-team/BLAKE3-specs.
    """
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return Digest(hasher.digest())


@lru_cache(maxsize=4096)
def format_peer_id(peer: PeerId) -> str:
    """Return libp2p's textual form, `12D3KooW…`."""
    return base58.b58encode(_LIBP2P_ED25519_PREFIX + peer).decode("ascii")


SHORT_CHARACTERS = 8


def short_peer_id(peer: PeerId) -> str:
    """Return a short form for people and logs, `12D3..x7Yz9fQ4`.

    The last eight characters distinguish peers: a key with the same last four is found in a minute.
    """
    text = format_peer_id(peer)
    return f"{text[:4]}..{text[-SHORT_CHARACTERS:]}"


def parse_peer_id(text: str) -> PeerId:
    """Parse libp2p's textual form of an Ed25519 peer id.

    Raises:
        ConfigError: `text` is not base58 or is not an Ed25519 key.
    """
    try:
        raw = base58.b58decode(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a peer id; expected base58 text that begins with 12D3KooW") from None
    if len(raw) != len(_LIBP2P_ED25519_PREFIX) + PEER_ID_BYTES or not raw.startswith(_LIBP2P_ED25519_PREFIX):
        raise ConfigError(f"{text!r} is not the id of an Ed25519 peer; expected text that begins with 12D3KooW")
    return PeerId(raw[len(_LIBP2P_ED25519_PREFIX) :])
