"""Where peers find each other: short signed records of who takes part in a run, and under which addresses.

A directory is a noticeboard, not an authority: records may be missing, old or of peers that are gone. What it does
hold was signed by the peer that it names.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import DIGEST_BYTES, PEER_ID_BYTES, Digest, PeerId, short_peer_id
from p2p_diloco.signing import SIGNATURE_BYTES, SigningKey, is_signed_by

MAX_RECORD_BYTES = 2048
MAX_ADDRESSES = 4
MAX_ADDRESS_BYTES = 256
MAX_LIFETIME_SECONDS = 24 * 3600.0
"""A record may be kept for so long after it was issued; a copy can not be made to last by somebody else."""

MOST_AHEAD_SECONDS = 3600.0
"""So far ahead of our clock a record may have been issued; records of the future would always be the youngest."""

_DOMAIN = b"p2p-diloco peer record\x00"
_VERSION = 1
_HEAD = struct.Struct(f">B{DIGEST_BYTES}s{PEER_ID_BYTES}s?BdB")
_ADDRESS_LENGTH = struct.Struct(">H")


class PeerRole(enum.Enum):
    """What a peer does in the run."""

    TRAINER = 1
    BOOTSTRAP = 2
    LISTENER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """One peer's signed word on how to reach it.

    Attributes:
        run: digest of the manifest; records of other runs are not mixed.
        peer: who it is; the signature is checked with it.
        addresses: full multiaddrs, `/p2p/<id>` included; empty when it cannot be dialled.
        can_be_dialled: whether the peer believes so.
        role: what it does in the run.
        issued_at: unix seconds of its own clock; of two records the later one counts.
        signature: Ed25519 over all the rest.
    """

    run: Digest
    peer: PeerId
    addresses: tuple[str, ...]
    can_be_dialled: bool
    role: PeerRole
    issued_at: float
    signature: bytes = b""

    def encode(self) -> bytes:
        """Return the bounded binary form."""
        return self._body() + self.signature

    def is_authentic(self) -> bool:
        """Return whether the peer that the record names has signed it."""
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
    """Return the signed record of the peer that holds `key`; addresses beyond what a record takes are left out."""
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


@functools.lru_cache(maxsize=4096)  # one record comes again and again, and checking a signature takes 0.1 ms
def decode_record(encoded: bytes) -> PeerRecord:
    """Read one record and check its signature.

    Raises:
        FrameError: it is too long, malformed, or not signed by the peer that it names.
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
    if record.encode() != encoded or not record.is_authentic():
        raise FrameError(f"a peer record of {short_peer_id(record.peer)} is not signed by it")
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
    """The noticeboard of one run."""

    @abstractmethod
    async def announce(self, record: PeerRecord, expires_at: float) -> None:
        """Publish `record` until `expires_at` (unix seconds), instead of an earlier one of the same peer.

        Clocks of peers differ: let records live for many minutes and announce again long before the end.

        Raises:
            PeerError: nobody took it; try again later.
        """

    @abstractmethod
    async def peers(self) -> tuple[PeerRecord, ...]:
        """Return the newest record of each peer that is known now, in the order of peer ids.

        Raises:
            PeerError: nobody answered; try again later.
        """


class MemoryDirectory(Directory):
    """A directory for peers in one process. `now_seconds` tells the time; `is_down` makes every call fail."""

    def __init__(self, now_seconds: Callable[[], float]) -> None:
        self._now_seconds = now_seconds
        self._records: dict[PeerId, tuple[PeerRecord, float]] = {}
        self.is_down = False

    async def announce(self, record: PeerRecord, expires_at: float) -> None:
        self._raise_if_down()
        known = self._records.get(record.peer)
        if known is None or known[0].issued_at <= record.issued_at:
            self._records[record.peer] = (decode_record(record.encode()), expires_at)

    async def peers(self) -> tuple[PeerRecord, ...]:
        self._raise_if_down()
        now = self._now_seconds()
        self._records = {peer: kept for peer, kept in self._records.items() if kept[1] > now}
        return tuple(self._records[peer][0] for peer in sorted(self._records))

    def _raise_if_down(self) -> None:
        if self.is_down:
            raise PeerError("the directory does not answer")
