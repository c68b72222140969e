"""A member as listed on a roster, and the declaration by which a peer gets listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.frames import SIGNATURE, U32, U64, fixed, many, number, record, signed_bytes, to_bytes

FULL_SHARE = 8
EQUAL_SHARE = FULL_SHARE // 2
SHARE = number("B", FULL_SHARE)
PLACE_BYTES = 8
NO_PLACE = bytes(PLACE_BYTES)
MOST_PROOFS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One peer on a roster; `incarnation` grows with each of its starts.

    Attributes:
        since: the cycle in which this peer was first listed. A new incarnation keeps it if it is listed before the peer
            is dropped; a peer that was dropped starts again.
        counts: whether its contributions have been in entries for long enough to let it vote.
        reduces: whether it can be reached and averages spans for others.
        trains: False only for the bootstrap peer, which reduces while it is needed and contributes nothing.
        share: share of averaging that its line can carry. With equal shares all members have 4; 8 is twice that or
            more, and 1 is the least. Full if the member does not reduce.
        place: the public address at which it was reached, as a short digest; at most one member of a place reduces.
            Zeros if it does not reduce, or was reached at no public address.
    """

    peer: PeerId
    incarnation: Annotated[int, U32]
    since: Annotated[int, U64] = 0
    counts: bool = False
    reduces: bool = True
    trains: bool = True
    share: Annotated[int, SHARE] = FULL_SHARE
    place: Annotated[bytes, fixed(PLACE_BYTES)] = NO_PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachProof:
    """A signed statement that the prover dialled another peer over a fresh connection and checked its identity.

    Attributes:
        place: the place of the address that it dialled; zeros if the address is not public.
        cycle: the cycle in which it dialled.
    """

    prover: PeerId
    place: Annotated[bytes, fixed(PLACE_BYTES)]
    cycle: Annotated[int, U64]
    signature: Annotated[bytes, SIGNATURE]

    def statement(self, run: Digest, proved: PeerId) -> bytes:
        """Return the bytes that are signed."""
        return b"reach proof" + run + proved + signed_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A peer's signed declaration about itself: that it wants to be a member, has changed, or leaves.

    Peers forward it to the voters.

    Attributes:
        cycle: the cycle in which it was signed; an old application is ignored, so that nobody can replay it.
        proofs: proofs of peers that have dialled this one; none if it does not claim to be reachable.
        leaving: whether this incarnation leaves the run.
    """

    run: Digest
    peer: PeerId
    incarnation: Annotated[int, U32]
    cycle: Annotated[int, U64]
    proofs: Annotated[tuple[ReachProof, ...], many(record(ReachProof), MOST_PROOFS)]
    trains: bool
    share: Annotated[int, SHARE]
    leaving: bool
    signature: Annotated[bytes, SIGNATURE]

    @property
    def reachable(self) -> bool:
        """Return whether the peer claims to be reachable. `ReachJudge` decides whether the claim counts."""
        return bool(self.proofs)

    def is_signed(self, verify: Callable[[PeerId, bytes, bytes], bool]) -> bool:
        """Return whether the signatures of the declaration and of each proof are valid."""
        return verify(self.peer, self.statement(), self.signature) and all(
            verify(proof.prover, proof.statement(self.run, self.peer), proof.signature) for proof in self.proofs
        )

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in a promise."""
        return len(to_bytes(self))

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"declaration" + signed_bytes(self)

    def age(self) -> tuple[int, bool, int]:
        """Return the key that is greatest for a peer's newest declaration; an incarnation leaves once and for all."""
        return (self.incarnation, self.leaving, self.cycle)
