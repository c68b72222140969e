"""The heartbeat: a peer's signed message with its identity, the positions of its logs and its training progress."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.frames import F32, I64, SIGNATURE, U32, U64, blob, fixed, many, record, signed_bytes
from p2p_diloco.protocol.wire.member import SHARE
from p2p_diloco.protocol.wire.peer_name import MOST_NAME_BYTES

MOST_FRAGMENTS = 1 << 12
SHORT_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHead:
    """The log position of a fragment at a closed boundary: its last closed round and a digest over its spans' tips."""

    round: Annotated[int, I64]
    digest: Annotated[Digest, fixed(SHORT_DIGEST_BYTES)]


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
        name: what its owner calls it, as `peer_name` encodes it; a stranger's may be anything.
        clock_behind: seconds by which its wall clock is behind the run's time, as far as it knows; negative: ahead.
    """

    run: Digest
    peer: PeerId
    incarnation: Annotated[int, U32]
    sequence: Annotated[int, U64]
    roster: Digest
    roster_k: Annotated[int, U64]
    heads: Annotated[tuple[FragmentHead, ...], many(record(FragmentHead), MOST_FRAGMENTS)]
    ready: bool
    takes_entries: bool
    can_be_dialled: bool
    share: Annotated[int, SHARE]
    trains: bool
    tokens: Annotated[int, U64]
    steps: Annotated[int, U64]
    tokens_per_second: Annotated[float, F32]
    loss: Annotated[float, F32]
    clock_behind: Annotated[float, F32] = 0.0
    name: Annotated[bytes, blob(MOST_NAME_BYTES)] = b""
    signature: Annotated[bytes, SIGNATURE]

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return self._statement

    # No slots, so that the bytes can be cached: many peers in one process may share the object.
    @cached_property
    def _statement(self) -> bytes:
        return b"heartbeat" + signed_bytes(self)

    def signed(self, sign: Callable[[bytes], bytes]) -> Heartbeat:
        """Return this heartbeat with its peer's signature."""
        signed = copy(self)  # keeps the cached statement, so that a check in this process does not encode it again
        object.__setattr__(signed, "signature", sign(self.statement()))
        return signed
