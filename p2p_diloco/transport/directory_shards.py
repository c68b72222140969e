"""The DHT keys of a run's records: spread over a fixed number of keys, so that no node serves a whole run.

A thousand records under one key would be a value of 300 kB, which one node and its replicas send to everybody. A record
is stored only in the shard given by the hash of its peer's id. This module is pure: keys, shards, and validation.
"""

from __future__ import annotations

import hashlib
import math

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.transport.directory import (
    MAX_LIFETIME_SECONDS,
    MOST_AHEAD_SECONDS,
    RECORD_LIFETIME_SECONDS,
    PeerRecord,
    decode_record,
    parse_record,
)

SHARDS = 16
"""With 1,024 peers, each shard has about 64, some 20 kB; four are requested at a time, far below hivemind's 4 MiB."""

_KEY_PREFIX = b"p2p-diloco/1/"


def shard_of(peer: PeerId) -> int:
    """Return the shard of the record of `peer`, 0 to `SHARDS` - 1; a function of its id."""
    return sha256(_KEY_PREFIX, peer)[0] % SHARDS


def directory_key(run: Digest, shard: int) -> bytes:
    """Return the DHT key of one shard of a run's records."""
    return _KEY_PREFIX + run + bytes((shard,))


def directory_keys(run: Digest) -> tuple[bytes, ...]:
    """Return the DHT keys of all shards of a run, in order."""
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
