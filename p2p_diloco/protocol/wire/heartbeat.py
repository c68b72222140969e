"""The heartbeat: a peer's signed message with its identity, the positions of its logs and its training progress."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    F32,
    FLAG,
    I64,
    PEER,
    SIGNATURE,
    U32,
    U64,
    Layout,
    fixed,
    many,
    record,
    to_bytes,
)
from p2p_diloco.protocol.wire.member import SHARE

MOST_FRAGMENTS = 1 << 12
SHORT_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHead:
    """The log position of a fragment at a closed boundary: its last closed round and a digest over its spans' tips."""

    round: int
    digest: Digest


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A signed sign of life of one peer.

    Attributes:
        sequence: grows by one; an older heartbeat that arrives late changes nothing.
        roster, roster_k: digest of the roster in force at this peer, and its place in the chain.
        heads: one per fragment at its closed boundary; empty for peers that hold no state.
        ready: whether the peer holds the agreed state, and takes part; False while its owner has paused it.
        takes_entries: whether entries are to be sent to it as to members: it is ready, or lacks at most a few.
        share: share of averaging that its line can carry, as on a roster.
        tokens, steps: trained so far in this incarnation.
        tokens_per_second: recent rate; 0 while the peer is paused.
        loss: the last training loss, 0 if there is none.
        clock_behind: seconds by which its wall clock is behind the run's time, as far as it knows; negative: ahead.
    """

    run: Digest
    peer: PeerId
    incarnation: int
    sequence: int
    roster: Digest
    roster_k: int
    heads: tuple[FragmentHead, ...]
    ready: bool
    takes_entries: bool
    can_be_dialled: bool
    share: int
    trains: bool
    tokens: int
    steps: int
    tokens_per_second: float
    loss: float
    clock_behind: float = 0.0
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return self._statement

    # No slots, so that the bytes can be cached: many peers in one process may share the object.
    @cached_property
    def _statement(self) -> bytes:
        return b"heartbeat" + to_bytes(self, _STATEMENT_LAYOUT)

    def signed(self, sign: Callable[[bytes], bytes]) -> Heartbeat:
        """Return this heartbeat with its peer's signature."""
        word = copy(self)  # keeps the cached statement, so that a check in this process does not encode it again
        object.__setattr__(word, "signature", sign(self.statement()))
        return word


_FRAGMENT_HEAD = record(FragmentHead, (("round", I64), ("digest", fixed(SHORT_DIGEST_BYTES))))
HEARTBEAT_LAYOUT: Layout = (
    ("run", DIGEST),
    ("peer", PEER),
    ("incarnation", U32),
    ("sequence", U64),
    ("roster", DIGEST),
    ("roster_k", U64),
    ("heads", many(_FRAGMENT_HEAD, MOST_FRAGMENTS)),
    ("ready", FLAG),
    ("takes_entries", FLAG),
    ("can_be_dialled", FLAG),
    ("share", SHARE),
    ("trains", FLAG),
    ("tokens", U64),
    ("steps", U64),
    ("tokens_per_second", F32),
    ("loss", F32),
    ("clock_behind", F32),
    ("signature", SIGNATURE),
)
_STATEMENT_LAYOUT = HEARTBEAT_LAYOUT[:-1]
