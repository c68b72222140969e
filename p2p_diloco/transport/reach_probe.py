"""Dial a peer from a separate socket, and check who answers.

libp2p's `connect` to a linked peer returns success without dialling, so it proves nothing about reachability. This
module opens a plain TCP connection and performs libp2p's handshake (multistream-select, then Noise XX) up to the
message in which the other end proves its identity. The other end does not learn who dialled, and no link is opened.

Source: the libp2p Noise specification, https://github.com/libp2p/specs/tree/master/noise, and revision 34 of the Noise
protocol framework, https://noiseprotocol.org/noise.html.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from p2p_diloco.errors import DialFailure, NotReached
from p2p_diloco.ids import PEER_ID_BYTES, PeerId, short_peer_id
from p2p_diloco.signing import SIGNATURE_BYTES, is_signed_by
from p2p_diloco.transport.protobuf import fields_of

_PROTOCOL = b"Noise_XX_25519_ChaChaPoly_SHA256"
_SIGNED_PREFIX = b"noise-libp2p-static-key:"
_KEY_BYTES = 32
_TAG_BYTES = 16
_MOST_LINE_BYTES = 128
_MOST_MESSAGE_BYTES = 4096
_ED25519_KEY = bytes.fromhex("08011220")
"""Prefix of libp2p's encoding of an Ed25519 public key: protobuf, type 1, then 32 bytes of data."""


async def probe_identity(peer: PeerId, host: str, port: int, deadline: float) -> None:
    """Check that `peer` can be dialled at `host` and `port`.

    Args:
        host: an IP address, or a host name.
        deadline: loop time.
    Raises:
        NotReached: nobody answered by the deadline, or another peer did; the text says which.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout_at(deadline):
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
            found = await _identity_behind(reader, writer)
    except TimeoutError:
        if writer is not None:
            raise NotReached(f"{place} accepts connections, but does not answer", DialFailure.SILENT) from None
        raise NotReached(f"{place} timed out", DialFailure.TIMED_OUT) from None
    except ConnectionRefusedError:
        raise NotReached(f"{place} refused", DialFailure.REFUSED) from None
    except UnicodeError:
        raise NotReached(f"{place} does not resolve (not a host name)", DialFailure.NO_NAME) from None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError, InvalidTag):
        raise NotReached(f"{place} answers, but is not a libp2p peer", DialFailure.OTHER_PROTOCOL) from None
    except socket.gaierror as error:
        raise NotReached(f"{place} does not resolve ({error.strerror})", DialFailure.NO_NAME) from None
    except OSError as error:
        if error.errno is None and "refused" in str(error).lower():  # at each of a name's addresses
            raise NotReached(f"{place} refused", DialFailure.REFUSED) from None
        reason = os.strerror(error.errno) if error.errno else "cannot be reached"
        raise NotReached(f"{place} has no route from here ({reason})", DialFailure.NO_ROUTE) from None
    finally:
        if writer is not None:
            writer.transport.abort()
    if found != peer:
        raise NotReached(f"{place} is another peer ({short_peer_id(found)})", DialFailure.OTHER_PEER)


def is_own_host(host: str) -> bool:
    """Return whether an IP address belongs to this machine, that is, whether it can bind to it."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as bound:
        try:
            bound.bind((host, 0))
        except OSError:
            return False
    return True


async def _identity_behind(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerId:
    """Perform the handshake up to the responder's proof; return the responder."""
    offers = (b"/multistream/1.0.0\n", b"/noise\n")
    writer.write(b"".join(bytes((len(offer),)) + offer for offer in offers))
    for offer in offers:
        if await _read_line(reader) != offer:
            raise ValueError("Noise is not supported")
    noise, ephemeral = _Handshake(), X25519PrivateKey.generate()
    own = ephemeral.public_key().public_bytes_raw()
    noise.mix_hash(own)
    noise.mix_hash(b"")  # the payload, which is empty
    writer.write(len(own).to_bytes(2, "big") + own)
    length = int.from_bytes(await reader.readexactly(2), "big")
    if not 2 * _KEY_BYTES + 2 * _TAG_BYTES <= length <= _MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = await reader.readexactly(length)
    theirs, sealed_key, sealed_payload = message[:32], message[32:80], message[80:]
    noise.mix_hash(theirs)
    noise.mix_key(ephemeral.exchange(X25519PublicKey.from_public_bytes(theirs)))
    static = noise.open(sealed_key)
    noise.mix_key(ephemeral.exchange(X25519PublicKey.from_public_bytes(static)))
    return _signer_of(noise.open(sealed_payload), static)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    length = (await reader.readexactly(1))[0]
    if not 0 < length <= _MOST_LINE_BYTES:
        raise ValueError(f"a line of {length} bytes")
    return await reader.readexactly(length)


@dataclass(slots=True)
class _Handshake:
    """The part of Noise's symmetric state that an initiator needs to read the second message."""

    chaining: bytes = _PROTOCOL
    transcript: bytes = _PROTOCOL
    key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.mix_hash(b"")  # the prologue, which is empty

    def mix_hash(self, message: bytes) -> None:
        self.transcript = hashlib.sha256(self.transcript + message).digest()

    def mix_key(self, secret: bytes) -> None:
        base = hmac.digest(self.chaining, secret, "sha256")
        self.chaining = hmac.digest(base, b"\x01", "sha256")
        self.key = hmac.digest(base, self.chaining + b"\x02", "sha256")

    def open(self, sealed: bytes) -> bytes:
        """Decrypt the first message under the newest key, so the nonce is 0."""
        opened = ChaCha20Poly1305(self.key).decrypt(bytes(12), sealed, self.transcript)
        self.mix_hash(sealed)
        return opened


def _signer_of(payload: bytes, static: bytes) -> PeerId:
    """Return the peer that signed the Noise key `static`, from the payload's first two protobuf fields."""
    fields = fields_of(payload)
    key, signature = fields.get(1, b""), fields.get(2, b"")
    is_ed25519 = key.startswith(_ED25519_KEY) and len(key) == len(_ED25519_KEY) + PEER_ID_BYTES
    if not is_ed25519 or len(signature) != SIGNATURE_BYTES:
        raise ValueError("no Ed25519 identity")
    peer = PeerId(key[len(_ED25519_KEY) :])
    if not is_signed_by(peer, _SIGNED_PREFIX + static, signature):
        raise ValueError("invalid identity proof")
    return peer
