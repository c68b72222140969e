"""Ed25519 signatures: a peer's id is the public key that verifies them."""

from __future__ import annotations

import functools

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p_diloco.ids import PeerId

SIGNATURE_BYTES = 64
PRIVATE_KEY_BYTES = 32


class SigningKey:
    """A private key with its peer id. Signing is deterministic (RFC 8032), so pure code may use it."""

    __slots__ = ("_private", "peer")

    def __init__(self, private_bytes: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(private_bytes)
        self.peer = PeerId(self._private.public_key().public_bytes_raw())

    def sign(self, statement: bytes) -> bytes:
        """Return the 64-byte signature of `statement`."""
        return self._private.sign(statement)

    def private_bytes(self) -> bytes:
        """Return the 32-byte seed, for identity files only."""
        return self._private.private_bytes_raw()


def is_signed_by(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Return whether `signature` is a valid signature of `statement` by `peer`; False for malformed input."""
    try:
        _public_key(peer).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _public_key(peer: PeerId) -> Ed25519PublicKey:
    """Return a peer's key; cached, because unpacking takes a quarter of the time of a verification."""
    return Ed25519PublicKey.from_public_bytes(peer)
