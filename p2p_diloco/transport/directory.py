"""Peer discovery: short signed records of the peers of a run and their addresses.

A directory is not an authority: records may be missing, outdated or of peers that are gone. But each record is signed
by the peer that it names.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import DIGEST_BYTES, PEER_ID_BYTES, Digest, PeerId, short_peer_id
from p2p_diloco.signing import SIGNATURE_BYTES, SigningKey, is_signed_by

MAX_RECORD_BYTES = 2048
MAX_ADDRESSES = 4
MAX_ADDRESS_BYTES = 256
RECORD_LIFETIME_SECONDS = 600.0
"""Lifetime of a record; peers announce themselves again long before its end."""
MAX_LIFETIME_SECONDS = 3600.0
"""Maximum lifetime of a record after it was issued; nobody else can extend it."""

MOST_AHEAD_SECONDS = 3600.0
"""Maximum time by which a record's issue time may be ahead of our clock; otherwise it would always count as newest."""

_DOMAIN = b"p2p-diloco peer record\x00"
_VERSION = 1
_HEAD = struct.Struct(f">B{DIGEST_BYTES}s{PEER_ID_BYTES}s?BdB")
_ADDRESS_LENGTH = struct.Struct(">H")


class PeerRole(enum.Enum):
    """The role of a peer in the run."""

    TRAINER = 1
    BOOTSTRAP = 2
    LISTENER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A peer's signed record of how to reach it.

    Attributes:
        run: digest of the manifest; records of different runs are kept separate.
        peer: id of the peer, which is the key that verifies the signature.
        addresses: full multiaddrs, including `/p2p/<id>`; empty if it cannot be dialled.
        can_be_dialled: whether the peer believes that it can be dialled.
        role: its role in the run.
        issued_at: Unix seconds of its own clock; the later of two records counts.
        signature: Ed25519 signature of all other fields.
    """

    run: Digest
    peer: PeerId
    addresses: tuple[str, ...]
    can_be_dialled: bool
    role: PeerRole
    issued_at: float
    signature: bytes = b""

    def encode(self) -> bytes:
        """Return the binary form, which has a bounded size."""
        return self._body() + self.signature

    def is_authentic(self) -> bool:
        """Return whether the record is signed by the peer that it names."""
        return is_signed_by(self.peer, _DOMAIN + self._body(), self.signature)

    def _body(self) -> bytes:
        role, count = self.role.value, len(self.addresses)
        head = _HEAD.pack(_VERSION, self.run, self.peer, self.can_be_dialled, role, self.issued_at, count)
        encoded = [address.encode() for address in self.addresses]
        return head + b"".join(_ADDRESS_LENGTH.pack(len(address)) + address for address in encoded)


def sign_record(
    key: SigningKey,
    *,
    run: Digest,
    addresses: tuple[str, ...],
    can_be_dialled: bool,
    role: PeerRole,
    issued_at: float,
) -> PeerRecord:
    """Return the signed record of the peer with `key`; addresses that do not fit are omitted."""
    kept: list[str] = []
    room = MAX_RECORD_BYTES - _HEAD.size - SIGNATURE_BYTES
    for address in addresses:
        cost = _ADDRESS_LENGTH.size + len(address.encode())
        if len(kept) < MAX_ADDRESSES and cost <= min(room, MAX_ADDRESS_BYTES + _ADDRESS_LENGTH.size):
            kept.append(address)
            room -= cost
    unsigned = PeerRecord(
        run=run, peer=key.peer, addresses=tuple(kept), can_be_dialled=can_be_dialled, role=role, issued_at=issued_at
    )
    signature = key.sign(_DOMAIN + unsigned._body())
    return replace(unsigned, signature=signature)


@functools.lru_cache(maxsize=4096)  # the same record arrives often, and checking a signature takes 0.1 ms
def decode_record(encoded: bytes) -> PeerRecord:
    """Parse one record and check its signature.

    Raises:
        FrameError: it is too long, malformed, or not signed by the peer that it names.
    """
    record = parse_record(encoded)
    if not record.is_authentic():
        raise FrameError(f"a peer record of {short_peer_id(record.peer)} is not signed by it")
    return record


def parse_record(encoded: bytes) -> PeerRecord:
    """Parse one record without checking its signature.

    Raises:
        FrameError: it is too long or malformed.
    """
    if not _HEAD.size + SIGNATURE_BYTES <= len(encoded) <= MAX_RECORD_BYTES:
        shortest = _HEAD.size + SIGNATURE_BYTES
        raise FrameError(f"a peer record has {shortest} to {MAX_RECORD_BYTES} bytes, not {len(encoded)}")
    version, run, peer, can_be_dialled, role, issued_at, count = _HEAD.unpack_from(encoded)
    if version != _VERSION:
        raise FrameError(f"a peer record has version {version}; this program knows version {_VERSION}")
    if count > MAX_ADDRESSES or not math.isfinite(issued_at):
        raise FrameError(f"a peer record of time {issued_at} names {count} addresses; {MAX_ADDRESSES} are allowed")
    addresses, end = _read_addresses(encoded, count)
    try:
        record = PeerRecord(
            run=Digest(run), peer=PeerId(peer), addresses=addresses, can_be_dialled=can_be_dialled,
            role=PeerRole(role), issued_at=issued_at, signature=encoded[end:],
        )  # fmt: skip
    except ValueError:
        raise FrameError(f"a peer record names the unknown role {role}") from None
    if record.encode() != encoded:
        raise FrameError(f"a peer record of {short_peer_id(record.peer)} is not in its one valid form")
    return record


def _read_addresses(encoded: bytes, count: int) -> tuple[tuple[str, ...], int]:
    addresses: list[str] = []
    offset = _HEAD.size
    for _ in range(count):
        if offset + _ADDRESS_LENGTH.size > len(encoded):
            raise FrameError("a peer record ends within its addresses")
        (length,) = _ADDRESS_LENGTH.unpack_from(encoded, offset)
        offset += _ADDRESS_LENGTH.size
        text = encoded[offset : offset + length]
        if length > MAX_ADDRESS_BYTES or not all(0x20 < byte < 0x7F for byte in text):
            raise FrameError(f"a peer record holds an address of {length} bytes or beyond printable ASCII")
        addresses.append(text.decode("ascii"))
        offset += length
    return tuple(addresses), offset


class Directory(ABC):
    """The directory of one run."""

    @abstractmethod
    async def announce(self, record: PeerRecord, expires_at: float) -> None:
        """Publish `record` until `expires_at` (Unix seconds), replacing an earlier one of the same peer.

        Clocks of peers differ: use lifetimes of many minutes and announce again long before the end.

        Raises:
            PeerError: no peer stored it; try again later.
        """

    @abstractmethod
    async def peers(self) -> tuple[PeerRecord, ...]:
        """Return the newest record of each known peer, in the order of peer ids.

        Raises:
            PeerError: no peer answered; try again later.
        """
