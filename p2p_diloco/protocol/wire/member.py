"""One member of a run as a roster lists it, and what a peer declares of itself to get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    FLAG,
    PEER,
    SIGNATURE,
    U32,
    U64,
    Layout,
    fixed,
    many,
    number,
    record,
    to_bytes,
)

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
        since: the cycle in which this peer was listed. Another incarnation that comes before the peer is dropped
            keeps it; a peer that was dropped begins anew.
        counts: enough of its contributions have been in entries for it to be one of those who may vote.
        reduces: can be reached, and averages spans for others.
        trains: False for the bootstrap only, which reduces while it is needed and contributes nothing.
        share: of averaging that its line carries: 4 is what all have where all have the same, 8 as much again or
            more, 1 the least; full where it does not reduce.
        place: the public address at which it was reached, as a short digest; of one place at most one member reduces.
            Zeros where it does not reduce, or was reached at no public address.
    """

    peer: PeerId
    incarnation: int
    since: int = 0
    counts: bool = False
    reduces: bool = True
    trains: bool = True
    share: int = FULL_SHARE
    place: bytes = NO_PLACE


MEMBER_LAYOUT: Layout = (
    ("peer", PEER),
    ("incarnation", U32),
    ("since", U64),
    ("counts", FLAG),
    ("reduces", FLAG),
    ("trains", FLAG),
    ("share", SHARE),
    ("place", fixed(PLACE_BYTES)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachProof:
    """A signed statement that the prover dialled another peer over a fresh connection and checked its identity.

    Attributes:
        place: of the address that it dialled; zeros for one that is not public.
        cycle: in which it did so.
    """

    prover: PeerId
    place: bytes
    cycle: int
    signature: bytes

    def statement(self, run: Digest, proved: PeerId) -> bytes:
        """Return the bytes that are signed."""
        return b"reach proof" + run + proved + to_bytes(self, REACH_PROOF_LAYOUT[:-1])


REACH_PROOF_LAYOUT: Layout = (
    ("prover", PEER),
    ("place", fixed(PLACE_BYTES)),
    ("cycle", U64),
    ("signature", SIGNATURE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A signed declaration of a peer about itself: that it wants to be a member, how it changed, or that it leaves.

    Peers pass it on to those who vote.

    Attributes:
        cycle: in which it was signed; an old application is worth nothing, so that nobody can replay it.
        proofs: of others that have dialled this peer; none where it does not claim to be reachable.
        leaving: this incarnation leaves the run.
    """

    run: Digest
    peer: PeerId
    incarnation: int
    cycle: int
    proofs: tuple[ReachProof, ...]
    trains: bool
    share: int
    leaving: bool
    signature: bytes

    @property
    def reachable(self) -> bool:
        """Return whether the peer claims to be reachable. `ReachJudge` decides whether the claim counts."""
        return bool(self.proofs)

    def is_signed(self, verify: Callable[[PeerId, bytes, bytes], bool]) -> bool:
        """Check the signature of the declaration and the signature of each proof."""
        return verify(self.peer, self.statement(), self.signature) and all(
            verify(proof.prover, proof.statement(self.run, self.peer), proof.signature) for proof in self.proofs
        )

    def num_bytes(self) -> int:
        """Return how many bytes it takes in a promise."""
        return len(to_bytes(self, DECLARATION_LAYOUT))

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"declaration" + to_bytes(self, DECLARATION_LAYOUT[:-1])

    def age(self) -> tuple[int, bool, int]:
        """Return the key by which the newest of a peer's declarations is found: it leaves once and for all."""
        return (self.incarnation, self.leaving, self.cycle)


DECLARATION_LAYOUT: Layout = (
    ("run", DIGEST),
    ("peer", PEER),
    ("incarnation", U32),
    ("cycle", U64),
    ("proofs", many(record(ReachProof, REACH_PROOF_LAYOUT), MOST_PROOFS)),
    ("trains", FLAG),
    ("share", SHARE),
    ("leaving", FLAG),
    ("signature", SIGNATURE),
)
