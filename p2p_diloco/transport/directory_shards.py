"""Where in the DHT a run's records lie: spread over a fixed number of keys, so that no node carries a whole run.

A thousand records under one key are a value of 300 kB that one node and its replicas hand to everybody. A record lies
in the shard that its peer's id hashes to, and nowhere else. Nothing here acts: keys, places, and what is accepted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.transport.directory import MAX_LIFETIME_SECONDS, MOST_AHEAD_SECONDS, decode_record

SHARDS = 16
"""Of 1,024 peers each shard holds about 64, some 20 kB; asked for four at a time, far below hivemind's 4 MiB."""
MOST_IN_SHARD = 512
"""Records that a reader takes from one shard: ids cost nothing, so anybody can make many for the same one."""

_KEY_PREFIX = b"p2p-diloco/1/"


def shard_of(peer: PeerId) -> int:
    """Return in which shard the record of `peer` lies, 0 to `SHARDS` - 1; anybody can work it out."""
    return sha256(_KEY_PREFIX, peer)[0] % SHARDS


def directory_key(run: Digest, shard: int) -> bytes:
    """Return the DHT key of one shard of a run's records."""
    return _KEY_PREFIX + run + bytes((shard,))


def directory_keys(run: Digest) -> tuple[bytes, ...]:
    """Return the DHT keys of all shards of a run, in order."""
    return tuple(directory_key(run, shard) for shard in range(SHARDS))


def choose_some(peers: Collection[bytes], draw: bytes) -> Collection[bytes]:
    """Return at most `MOST_IN_SHARD` of `peers`: all, or a sample.

    Args:
        draw: fresh random bytes for each look. Who floods a shard cannot make ids that are always taken, and a peer
            that was left out this time may be taken the next.
    """
    if len(peers) <= MOST_IN_SHARD:
        return peers
    return sorted(peers, key=lambda peer: sha256(draw, peer))[:MOST_IN_SHARD]


def is_acceptable(key: bytes, subkey: bytes, value: bytes, expires_at: float, now: float) -> bool:
    """Return whether a DHT entry is a signed record of a peer in the peer's own shard, with an honest lifetime.

    One peer has one such place: its id can be packed in other ways, which do not count.

    Args:
        key: SHA-1 of the directory key, as the DHT addresses it.
        subkey: msgpack of the peer id, in its shortest form.
        value: msgpack of the encoded record.
        expires_at: unix seconds; not covered by the signature, so it is bounded by the time of issue.
        now: unix seconds, by this peer's clock.
    """
    try:
        record = decode_record(_unpack_bytes(value))
        return (
            key == hashlib.sha1(directory_key(record.run, shard_of(record.peer))).digest()
            and subkey == bytes((0xC4, len(record.peer))) + record.peer
            and record.issued_at <= now + MOST_AHEAD_SECONDS
            and math.isfinite(expires_at)
            and expires_at <= record.issued_at + MAX_LIFETIME_SECONDS
        )
    except (FrameError, TypeError):
        return False


def _unpack_bytes(packed: bytes) -> bytes:
    """Read a msgpack `bin` of up to 64 KiB that holds all of `packed`."""
    for mark, width in ((0xC4, 1), (0xC5, 2)):
        if packed[:1] == bytes((mark,)):
            start = 1 + width
            if int.from_bytes(packed[1:start], "big") == len(packed) - start:
                return bytes(packed[start:])
    raise FrameError("a directory entry is not a string of bytes")
