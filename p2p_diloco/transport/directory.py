"""Peer discovery: short signed records of the peers of a run and their addresses, and their places in a DHT.

A directory is not an authority: records may be missing, outdated or of peers that are gone. But each record is signed
by the peer that it names.

A thousand records under one key would be a value of 300 kB, which one node and its replicas send to everybody. So the
records of a run are spread over a fixed number of keys, and each is stored only in the shard given by the hash of its
peer's id.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from p2p_diloco.errors import ConfigError, FrameError
from p2p_diloco.ids import DIGEST_BYTES, PEER_ID_BYTES, Digest, PeerId, parse_peer_id, sha256, short_peer_id
from p2p_diloco.signing import SIGNATURE_BYTES, SigningKey, is_signed_by
from p2p_diloco.transport.protobuf import encode_field, fields_of

MAX_RECORD_BYTES = 2048
MAX_ADDRESSES = 4
MAX_ADDRESS_BYTES = 256
RECORD_LIFETIME_SECONDS = 600.0
"""Lifetime of a record; peers announce themselves again long before its end."""
MAX_LIFETIME_SECONDS = 3600.0
"""Maximum lifetime of a record after it was issued; nobody else can extend it."""

MOST_AHEAD_SECONDS = 3600.0
"""Maximum time by which a record's issue time may be ahead of our clock; otherwise it would always count as newest."""

SHARDS = 16
"""With 1,024 peers, each shard has about 64, some 20 kB; four are requested at a time, far below hivemind's 4 MiB."""
MOST_ADDRESSES_SENT = 64
"""Maximum addresses in one answer."""
ADDRESSES_FIELD = 100
"""Number of the field, which hivemind's messages do not have."""

_KEY_PREFIX = b"p2p-diloco/1/"
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


def shard_of(peer: PeerId) -> int:
    """Return the shard of the record of `peer`, 0 to `SHARDS` - 1; a function of its id."""
    return sha256(_KEY_PREFIX, peer)[0] % SHARDS


def directory_key(run: Digest, shard: int) -> bytes:
    """Return the DHT key of one shard of a run's records."""
    return _KEY_PREFIX + run + bytes((shard,))


def directory_keys(run: Digest) -> tuple[bytes, ...]:
    return tuple(directory_key(run, shard) for shard in range(SHARDS))


def is_acceptable(
    run: Digest,
    key: bytes,
    subkey: bytes,
    value: bytes,
    expires_at: float,
    now: float,
    *,
    checks_signature: bool = True,
) -> bool:
    """Return whether a DHT entry is a signed record of a peer in that peer's shard, with a valid lifetime.

    Each peer has exactly one valid place: other msgpack encodings of its id are refused.

    Args:
        run: digest of the run; records of other runs are refused.
        key: SHA-1 of the directory key, as used by the DHT.
        subkey: msgpack of the peer id, in its shortest form.
        value: msgpack of the encoded record.
        expires_at: Unix seconds; not covered by the signature, so it is bounded by the time of issue.
        now: Unix seconds of this peer's clock.
        checks_signature: whether to check the signature, too, which takes 0.1 ms.
    """
    try:
        record = (decode_record if checks_signature else parse_record)(record_in(value))
        return (
            record.run == run
            and key == hashlib.sha1(directory_key(run, shard_of(record.peer))).digest()
            and subkey == subkey_of(record.peer)
            and record.issued_at <= now + MOST_AHEAD_SECONDS
            and math.isfinite(expires_at)
            and expires_at <= record.issued_at + MAX_LIFETIME_SECONDS
        )
    except (FrameError, TypeError):
        return False


def expiry_of(record: PeerRecord) -> float:
    """Return when a record expires, in Unix seconds: it follows from what its peer has signed."""
    return record.issued_at + RECORD_LIFETIME_SECONDS


def subkey_of(peer: bytes) -> bytes:
    """Return msgpack of a peer id, in its shortest form."""
    return bytes((0xC4, len(peer))) + peer


def record_in(packed: bytes) -> bytes:
    """Parse the value of a DHT entry, which must be exactly one msgpack `bin` of up to 64 KiB.

    Raises:
        FrameError: it is anything else.
    """
    for mark, width in ((0xC4, 1), (0xC5, 2)):
        if packed[:1] == bytes((mark,)):
            start = 1 + width
            if int.from_bytes(packed[1:start], "big") == len(packed) - start:
                return bytes(packed[start:])
    raise FrameError("a directory entry is not a string of bytes")


# -- the addresses of the peers that an answer names


def encode_addresses(addresses: Iterable[str]) -> bytes:
    """Return full multiaddrs as a field that hivemind's answers do not have; nothing if there are none.

    hivemind names neighbours by their ids alone, and would find their addresses in a second DHT, of the libp2p daemon,
    in which strangers can store without bounds.
    """
    text = "\n".join(islice(addresses, MOST_ADDRESSES_SENT)).encode("ascii", "ignore")
    return encode_field(ADDRESSES_FIELD, text) if text else b""


def decode_addresses(answer: bytes) -> dict[PeerId, tuple[str, ...]]:
    """Return the addresses by peer in an encoded answer; they must be checked before they are dialled."""
    try:
        value = fields_of(answer).get(ADDRESSES_FIELD, b"")
    except ValueError:  # answers to other questions have fields without a length
        return {}
    found: dict[PeerId, tuple[str, ...]] = {}
    for line in value[: MOST_ADDRESSES_SENT * (MAX_ADDRESS_BYTES + 1)].split(b"\n")[:MOST_ADDRESSES_SENT]:
        address = line.decode("ascii", "replace")
        try:
            peer = parse_peer_id(address.rpartition("/p2p/")[2])
        except ConfigError:
            continue
        if len(found.get(peer, ())) < MAX_ADDRESSES:
            found[peer] = (*found.get(peer, ()), address)
    return found
